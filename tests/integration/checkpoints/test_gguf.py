"""Conversion of GGUF files: dequantized weights, tokenizer, chat template, and one sentence for contradictory files."""

import re
import subprocess
import sys
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.checkpoints import gguf_conversion
from longleaf.checkpoints.gguf_conversion import convert, convert_to_cache, read_note
from longleaf.checkpoints.interaction import Interaction
from longleaf.cli.models import describe_dequantized
from longleaf.config import EngineConfig
from longleaf.errors import InvalidArgument, ModelRefused, StartError
from longleaf.model_report import Dequantized
from longleaf.resources import Memory
from tests.support.conversations import conversation_ids
from tests.support.gguf_files import DIM, HEADS, NUM_LAYERS, write_llama
from tests.support.small_disk import small_disk
from workers import gguf_convert
from workers.compat_check import check


class Notes:
    """Collects messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.user = Interaction(self.lines.append, lambda _: True, has_progress_bars=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(file: Path) -> Path:
    """Converted in this process, which has imported transformers."""
    gguf_convert.convert(file, file.parent / "converted", "float32")
    return file.parent / "converted"


def test_weights_are_the_dequantized_ones(file: Path, converted: Path) -> None:
    """Matrices of queries and keys are stored with the pairs of rotary dims interleaved."""
    found = load_file(converted / "model.safetensors")
    stored = {each.name: each for each in gguf.GGUFReader(file).tensors}

    def dequantized(name: str) -> np.ndarray:
        return gguf.dequantize(stored[name].data, stored[name].tensor_type).reshape(tuple(reversed(stored[name].shape)))

    assert np.array_equal(found["model.embed_tokens.weight"], dequantized("token_embd.weight"))
    for layer in range(NUM_LAYERS):
        for ours, theirs in (("self_attn.v_proj", "attn_v"), ("mlp.down_proj", "ffn_down")):
            weights = found[f"model.layers.{layer}.{ours}.weight"]
            assert np.array_equal(weights, dequantized(f"blk.{layer}.{theirs}.weight"))
        rows = dequantized(f"blk.{layer}.attn_q.weight").reshape(HEADS, DIM // HEADS // 2, 2, DIM)
        queries = found[f"model.layers.{layer}.self_attn.q_proj.weight"]
        assert np.array_equal(queries, rows.swapaxes(1, 2).reshape(DIM, DIM))


def test_checkpoint_is_exact_for_the_dequantized_weights(file: Path, converted: Path) -> None:
    report = check(EngineConfig(model=str(converted), kv_bytes=1 << 20), has_weights=True)
    assert (report.reason, report.is_exact, report.dtype) == ("", True, "float32")
    plain = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    saved = AutoModelForCausalLM.from_pretrained(converted)
    ids = torch.arange(40)[None] * 5 % 250
    with torch.no_grad():
        assert torch.equal(saved(ids).logits, plain(ids).logits)


def test_tokenizer_and_chat_template_are_those_of_the_file(file: Path, converted: Path) -> None:
    plain = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    turns = [("user", "abcd é"), ("assistant", "x"), ("user", "cd")]
    messages = [{"role": role, "content": content} for role, content in turns]
    wanted = plain.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert conversation_ids(Tokenizer.load(converted, DirectRenderer()), turns) == wanted


def test_file_is_converted_once_into_the_cache(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    notes = Notes()
    folder = convert_to_cache(file, notes.user)
    assert folder.is_relative_to(tmp_path / "longleaf" / "models") and folder.name == "tiny"
    assert re.fullmatch(
        r"converting tiny.gguf \(Q8_0, Q4_0, F32; .* KiB\) to safetensors in float32 \(.* KiB\), once, in .*",
        notes.lines[0],
    )
    kinds = {"Q8_0": 8, "Q4_0": 8, "F32": 5}
    assert read_note(folder) == Dequantized("tiny.gguf", kinds, "float32")
    assert "Exact means equal to transformers' `generate` on the dequantized weights." in describe_dequantized(
        Dequantized("tiny.gguf", kinds, "float32")
    )
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(file.read_bytes())
    assert convert_to_cache(copy, notes.user) == folder
    assert notes.lines[1:] == [f"using the converted copy of tiny.gguf in {folder}"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny", "tiny.lock"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"block_count": 3}, "it lacks weights that its architecture needs: "),
        ({"embedding_length": 1 << 30}, "the shapes of its tensors contradict its metadata"),
        ({"feed_forward_length": 1 << 30}, "the shapes of its tensors contradict its metadata"),
        ({"attention.head_count": 1 << 30}, ""),
    ],
)
@pytest.mark.extended
def test_metadata_that_contradict_the_tensors_are_refused(tmp_path: Path, changed: dict[str, int], reason: str) -> None:
    file = write_llama(tmp_path / "tiny.gguf", **{name.replace(".", "__"): value for name, value in changed.items()})
    with pytest.raises(ModelRefused) as refused:
        convert(file, tmp_path / "model", "float32", Notes().user)
    assert str(refused.value).startswith(f"{file} cannot be converted: {reason}") and "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.gguf"]


@pytest.mark.extended
def test_memory_of_the_process_is_limited(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "workers.gguf_convert", file, tmp_path / "model", "float32", str(1 << 20)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode == 0:  # an allocation of Python, and not one of a library, which may abort
        assert msgspec.json.decode(done.stdout)["reason"] == "it needs more memory than its tensors explain"


def test_full_disk_and_small_memory_are_named_before_the_conversion(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk, pytest.raises(StartError, match=r"KiB free, and the weights"):
        convert(file, disk.folder / "model", "float32", Notes().user)
    monkeypatch.setattr(gguf_conversion, "memory", lambda: Memory(1 << 29, 1 << 28))
    with pytest.raises(StartError, match=r"needs 1.0 GiB of memory, and 256.0 MiB are free"):
        convert(file, tmp_path / "model", "float32", Notes().user)


def test_existing_folder_is_not_replaced(file: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="exists: name a new folder"):
        convert(file, tmp_path, "float32", Notes().user)
