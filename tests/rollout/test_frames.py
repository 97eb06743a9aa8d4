"""Looking at threads never stops the process: no garbage is collected meanwhile."""

import gc
import json
import subprocess
import sys

import pytest

from upweight.rollout.frames import current_frames

# Looks 50 times by each way, with a collection due at every new object; prints for each way whether one came inside of a look.
LOOKS = """
import gc, json, sys, threading
from upweight.rollout.frames import current_frames

inside, collected, real = [False], [], sys._current_frames

def watched():
    inside[0] = True
    try:
        return real()
    finally:
        inside[0] = False

sys._current_frames = watched
gc.collect()
gc.callbacks.append(lambda phase, info: collected.append(inside[0]))
found = []
for look in (current_frames, sys._current_frames):
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(8)]  # new ones: nobody has asked for their frames yet
    for thread in threads:
        thread.start()
    collected.clear()
    gc.set_threshold(1)
    for _ in range(50):
        assert threading.get_ident() in look()
    gc.set_threshold(700)
    found.append(any(collected))
    stop.set()
    for thread in threads:
        thread.join()
print(json.dumps(found))
"""


def test_nothing_is_collected_inside_of_a_look() -> None:
    """In a process of its own: a look by the bare function may stop the whole process, if it has thread-locals to collect."""
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    ours, bare = json.loads(done.stdout)
    assert not ours
    if sys.version_info < (3, 12):  # later ones collect between bytecodes alone
        assert bare


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_stay_as_they_were(enabled: bool) -> None:
    gc.enable() if enabled else gc.disable()
    try:
        current_frames()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
