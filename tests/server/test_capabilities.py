"""What the server says that it can do, against what it takes."""

from __future__ import annotations

from typing import Any

from server_harness import Running

from upweight.server.methods import Reinforcement


def test_what_is_listed_is_what_a_job_may_ask_for(shared: Running) -> None:
    answer = shared.http.get("/v1alpha1/capabilities").json()
    assert set(answer["methods"]) == {"reinforcement", "supervised", "dpo"}
    assert "prompt_logprobs" in answer["inference"]
    fields: dict[str, Any] = answer["methods"]["reinforcement"]["properties"]
    assert set(fields) == set(Reinforcement.model_fields)
    assert fields["beta"]["minimum"] == 0  # the KL penalty
    assert "value_head" in str(fields["critic"])
    group = {"advantage": "group"}
    by_reward = {"ppo", "reinforce", "reinforce_pp"}
    for algorithm in fields["algorithm"]["enum"]:
        more = {"algorithm": algorithm, **({"advantage": "reward"} if algorithm in by_reward else group)}
        body = {"model": shared.model, "method": {"type": "reinforcement", "reinforcement": {"batch_size": 2, **more}}}
        made = shared.http.post("/v1/fine_tuning/jobs", json=body)
        assert made.status_code == 200, made.text
        shared.http.post(f"/v1/fine_tuning/jobs/{made.json()['id']}/cancel")


def test_it_needs_a_key(shared: Running) -> None:
    assert shared.http.get("/v1alpha1/capabilities", headers={"Authorization": "Bearer wrong"}).status_code == 401
