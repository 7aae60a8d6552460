"""`longleaf verify`."""

import json

from longleaf.rank_protocol.verdict import Verification
from tests.support.terminal import Terminal

GOOD = Verification(
    max_difference=0.0005, max_logit=10.0, compared_tokens=8, equal_tokens=8, holding_ranks=1, dtype="float32"
)
BAD = Verification(
    max_difference=0.5, max_logit=10.0, compared_tokens=8, equal_tokens=3, holding_ranks=1, dtype="float32"
)


async def test_success_exits_with_0(terminal: Terminal) -> None:
    terminal.engine.comparison = GOOD
    code, out, _ = await terminal.run("verify", "--seed", "4", "--prompt-tokens", "80", "--max-tokens", "8")
    assert code == 0
    assert out.splitlines()[0] == "passed: the logits differ by at most 0.0005, 0.001 is allowed"
    assert all(words in out for words in ("the same for 8 of 8 tokens", "80 tokens; keys on 1 of 1 rank"))
    assert len(terminal.engine.prompts[0].token_ids) == 80


async def test_small_differences_are_printed(terminal: Terminal) -> None:
    found = {"max_difference": 7.629e-6, "max_logit": 0.04, "compared_tokens": 8, "equal_tokens": 8, "holding_ranks": 1}
    terminal.engine.comparison = Verification(**found, dtype="float32")
    _, out, _ = await terminal.run("verify")
    assert out.splitlines()[0] == "FAILED: the logits differ by at most 0.00000763, 0.000004 is allowed"
    assert "0.00000763, token" in out


async def test_failure_exits_with_3(terminal: Terminal) -> None:
    terminal.engine.comparison = BAD
    code, out, _ = await terminal.run("verify")
    assert (code, out.splitlines()[0]) == (3, "FAILED: the logits differ by at most 0.5, 0.001 is allowed")
    code, out, _ = await terminal.run("verify", "--json")
    assert (code, json.loads(out)["passed"], json.loads(out)["equal_tokens"]) == (3, False, 3)


async def test_inconclusive_result_exits_with_4(terminal: Terminal) -> None:
    rounded = {"distance": 0.1, "reference_distance": 0.125, "dtype": "int8", "reference_dtype": "bfloat16"}
    terminal.engine.comparison = Verification(max_difference=0.5, max_logit=10.0, compared_tokens=8, **rounded)
    code, out, _ = await terminal.run("verify")
    assert code == 4
    assert out.splitlines()[0] == (
        "not conclusive: the logits differ from float32 by 10.00% of their spread, 50.00% is allowed, because plain "
        "attention in bfloat16 differs by 12.50%: wrong ranks could pass; serve with --dtype float32 --kv-dtype auto "
        "to be sure"
    )


async def test_failed_comparison_gives_the_reason(terminal: Terminal) -> None:
    terminal.engine.comparison = Verification(failure="plain attention failed: no memory")
    code, out, _ = await terminal.run("verify", "--text", "hello")
    assert (code, out) == (3, "FAILED: plain attention failed: no memory\n")


async def test_prompt_that_is_too_long_names_the_option(terminal: Terminal) -> None:
    code, _, err = await terminal.run("verify", "--prompt-tokens", "4000")
    assert (code, err) == (2, "error: --prompt-tokens: 4,000 is not between 1 and 1,024\n")
