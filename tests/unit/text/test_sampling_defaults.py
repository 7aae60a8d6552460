"""Default sampling parameters of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.text.checkpoint import read_sampling
from longleaf.errors import ModelRefused
from longleaf.sampling import Sampling


def write(folder: Path, **content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_named_parameters_are_used_and_others_keep_their_defaults(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) == Sampling(), "without a file"
    named = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    write(tmp_path, do_sample=True, eos_token_id=[1, 2], max_new_tokens=9, transformers_version="5.0", **named)
    assert read_sampling(tmp_path) == Sampling(**named)
    write(tmp_path, do_sample=True, top_p=0.9, top_k=None)
    assert read_sampling(tmp_path) == Sampling(temperature=1.0, top_p=0.9)


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": False}, {"do_sample": None}])
def test_greedy_without_do_sample_as_in_transformers(tmp_path: Path, do_sample: dict[str, Any]) -> None:
    write(tmp_path, temperature=0.6, top_k=20, repetition_penalty=1.1, **do_sample)
    assert read_sampling(tmp_path) == Sampling(repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "hot", "temperature: "),
        ("temperature", -1, "temperature: must be between 0 and 100"),
        ("top_k", 2.5, "top_k: "),
        ("top_p", [1], "top_p: "),
        ("repetition_penalty", 0, "repetition_penalty: must be above 0"),
    ],
)
def test_invalid_parameter_is_refused_with_its_file(tmp_path: Path, field: str, value: object, message: str) -> None:
    write(tmp_path, do_sample=True, **{field: value})
    with pytest.raises(ModelRefused, match=f"generation_config.json: {message}"):
        read_sampling(tmp_path)
