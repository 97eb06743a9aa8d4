"""The page in headless Chromium, against a real server with the fake worker. A browser that is not installed is an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_harness import KEY, Running, Start, sample

pytestmark = pytest.mark.ci

PATIENCE = 20  # seconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert program, "Chromium is not installed: install Debian's packages chromium and chromium-driver"
    assert driver, "chromedriver is not installed: install Debian's package chromium-driver"
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


Until = Callable[[str], Any]


@pytest.fixture
def until(browser: Any) -> Until:
    """`until(script)`: what the script returns in the page, once that is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    def wait(script: str) -> Any:
        return WebDriverWait(browser, PATIENCE, poll_frequency=0.1).until(
            lambda chrome: chrome.execute_script(f"return {script}"), message=script
        )

    return wait


def text(selector: str) -> str:
    return f"document.querySelector({selector!r})?.innerText"


def keys(browser: Any, *pressed: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*pressed).perform()


def open_page(browser: Any, server: Running, place: str, key: str = KEY) -> None:
    browser.get("about:blank")
    browser.get(f"{str(server.http.base_url).rstrip('/')}/#key={key}{place}")


def of_words(words: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A sample whose second half is trained."""
    from upweight.tokenizer import Tokenizer

    tokens = Tokenizer.from_folder(folder).encode(words)
    half = len(tokens) // 2
    mask = [0] * half + [1] * (len(tokens) - half)
    return sample(token_ids=tokens, mask=mask, logprobs=[-0.5 * one for one in mask], **changes)


def test_a_wrong_key_is_told_and_the_right_one_opens(browser: Any, until: Until, start: Start) -> None:
    server = start()
    browser.delete_all_cookies()
    open_page(browser, server, "", key="wrong")
    assert "does not know the key" in until(text(".problem"))
    assert "wrong" not in browser.current_url
    keys(browser, KEY, "\ue007")
    assert "No job yet" in until(text(".none"))
    assert KEY not in browser.current_url


def test_a_job_is_followed_without_reload(browser: Any, until: Until, start: Start, tiny_model_folder: Path) -> None:
    server = start()
    server.model = str(tiny_model_folder)
    open_page(browser, server, "")
    until("document.querySelector('.none:not([hidden])')")
    browser.execute_script("window.same = true")
    job = server.create_job(batch_size=2, num_batches=3)
    until(f"document.querySelector('a[href=\"#/jobs/{job}\"]')").send_keys("\ue007")  # by keyboard
    until("document.querySelectorAll('.question h2').length === 4")
    assert "No rollout program was heard" in until(f"{text('.headline.stalled')}")
    assert f"TOKENFACTORY_ROLLOUT_JOB_ID={job}" in until(text(".chain"))

    hostile = "<img src=x onerror='window.broken = true'>"
    for index in range(2):
        server.http.post(server.rl(job, "batches"), json={"index": index})
        uploads = [
            of_words(
                f"A question? {hostile} Answer number {i}",
                tiny_model_folder,
                id=f"{index}/{i}{hostile}",
                debug_info={"reward": 0.25 * (index + 1), "note": hostile},
            )
            for i in range(2)
        ]
        answer = server.upload(job, index, uploads)
        assert answer.status_code == 200, answer.text
    assert until("[...document.querySelectorAll('.numbers dd')][0]?.innerText === '2'")
    assert until("document.querySelectorAll('.chart .plot canvas').length >= 2")
    assert "reward" in until("document.querySelector('.chart .plot').ariaLabel").lower()
    assert until("document.querySelectorAll('.fingerprints tbody tr').length === 3")
    assert "4 trained" in until("document.querySelector('.question:last-child .quiet').innerText")

    summary = until("document.querySelectorAll('.sample summary')[0]")
    assert "Answer number 1" in summary.text
    summary.send_keys("\ue007")
    shown = until("document.querySelector('.sample[open] .tokens')")
    assert "A question? " + hostile in shown.text
    shown.send_keys("\ue014")
    assert "context, not trained" in until(text(".told"))
    for _ in range(30):
        shown.send_keys("\ue014")
    assert "logprob −0.500" in until(text(".told"))
    assert hostile in until(text(".sample[open] dl.facts"))

    browser.execute_script(
        "document.querySelector('#search').value = 'number 0'; document.querySelector('.filter').requestSubmit()"
    )
    assert until("document.querySelectorAll('.sample').length === 2")
    server.stop()
    assert "not reached" in until(text(".connection.bad"))
    assert browser.execute_script(
        "return window.same === true && !window.broken && !document.querySelector('main img')"
    )
    complaints = [entry["message"] for entry in browser.get_log("browser") if "net::ERR" not in entry["message"]]
    assert [one for one in complaints if "401" not in one] == []


def test_a_job_on_a_file_says_how_far_it_is_and_asks_for_no_rollouts(browser: Any, until: Until, start: Start) -> None:
    server = start({"train_seconds": 0.5})
    form: dict[str, Any] = {
        "files": {"file": ("pairs.jsonl", b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n')},
        "data": {"purpose": "fine-tune"},
    }
    file = server.http.post("/v1/files", **form).json()["id"]
    method = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 40, "lora": {"rank": 4}}}}
    asked = {"model": server.model, "training_file": file, "method": method}
    job = server.http.post("/v1/fine_tuning/jobs", json=asked).json()["id"]
    open_page(browser, server, f"/jobs/{job}")
    until(f"/^[1-9]\\d? of 40 batches trained/.test({text('.batches')})")
    assert "dpo · LoRA rank 4" in until(text("header.job"))
    assert "None are needed: the job trains on a file" in until(text(".chain"))


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1400, "dark")])
def test_it_fits_a_phone_and_follows_the_colour_scheme(
    browser: Any, until: Until, start: Start, width: int, scheme: str
) -> None:
    server = start()
    job = server.create_job()
    server.fill(job, 0)
    device = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        for place, sign in (("", ".jobs a"), (f"/jobs/{job}", ".sample")):
            open_page(browser, server, place)
            until(f"document.querySelector('{sign}')")
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(int(part) for part in ground[4:-1].split(",")) < 200) is (scheme == "dark")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
