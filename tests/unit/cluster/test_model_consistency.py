"""The machines that an error names when models differ."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.cluster.model_consistency import check_models
from longleaf.config import embedded_model
from longleaf.errors import ModelRefused, StartError
from longleaf.fingerprint import Fingerprint, read_fingerprint
from longleaf.rank_protocol.member_messages import Hello

OWN = read_fingerprint(embedded_model())


def model(digest: str, **files: str | None) -> Fingerprint:
    """The fingerprint of the embedded model with changed file digests; None removes a file. Keys lack extensions."""
    names = {name.partition(".")[0]: name for name in OWN.files} | {"template": "chat_template.jinja"}
    changed = OWN.files | {names[key]: reported for key, reported in files.items() if reported is not None}
    removed = {names[key] for key, reported in files.items() if reported is None}
    return Fingerprint(digest, {name: reported for name, reported in changed.items() if name not in removed})


def hello(rank: int, fingerprint: Fingerprint | None = OWN, missing: str = "") -> Hello:
    return Hello(rank, f"node-{rank}", f"10.0.0.{rank}", 1, fingerprint=fingerprint, missing=missing)


OTHER = model("other", tokenizer="another")
CASES: dict[str, tuple[list[Hello], str]] = {
    "another": (
        [hello(0), hello(1, OTHER), hello(2)],
        "node node-1 (10.0.0.1) has a different tokenizer.json than node node-0 (10.0.0.0)",
    ),
    "most count": (
        [hello(0, OTHER), hello(1), hello(2)],
        "node node-0 (10.0.0.0) has a different tokenizer.json than node node-1 (10.0.0.1)",
    ),
    "a tie": (
        [hello(0), hello(1, model("other", model="another"))],
        "node node-1 (10.0.0.1) has a different model.safetensors than node node-0 (10.0.0.0)",
    ),
    "lacks": (
        [hello(0), hello(1, model("other", tokenizer_config=None))],
        "node node-1 (10.0.0.1) lacks tokenizer_config.json, which exists on node node-0 (10.0.0.0)",
    ),
    "has more": (
        [hello(0), hello(1, model("other", template="one", model="another"))],
        "node node-1 (10.0.0.1) has chat_template.jinja, which is missing on node node-0 (10.0.0.0), and 1 more",
    ),
    "missing": ([hello(0), hello(1, None, "/m does not exist")], "node node-1 (10.0.0.1): /m does not exist"),
    "missing everywhere": (
        [hello(0, None, "/m is gone"), hello(1, None, "/m is lost")],
        "node node-0 (10.0.0.0): /m is gone; node node-1 (10.0.0.1): /m is lost",
    ),
    "many": (
        [hello(0), *(hello(rank, None, "gone") for rank in range(1, 6))],
        "node node-1 (10.0.0.1): gone; node node-2 (10.0.0.2): gone; node node-3 (10.0.0.3): gone; and 2 more",
    ),
    "the coordinator": (
        [hello(0, OTHER), hello(1, None)],
        "the coordinator's node has a different tokenizer.json than node node-0 (10.0.0.0)",
    ),
}


@pytest.mark.parametrize(("hellos", "expected"), CASES.values(), ids=CASES)
async def test_nodes_with_different_models_are_named(hellos: list[Hello], expected: str) -> None:
    with pytest.raises(StartError) as caught:
        await check_models(hellos, embedded_model())
    assert str(caught.value) == f"model: {expected}"


async def test_equal_weights_in_different_files_agree() -> None:
    """A node may have the weights in other files; only the first rank of a node reports them."""
    elsewhere = replace(OWN, files={("a" if "safetensors" in name else name): OWN.files[name] for name in OWN.files})
    await check_models([hello(0), hello(1, None), hello(2, elsewhere)], embedded_model())


async def test_ranks_without_a_model_need_no_folder(tmp_path: Path) -> None:
    await check_models([hello(0, None)], tmp_path)
    with pytest.raises(ModelRefused, match=r"has no config\.json"):
        await check_models([hello(0)], tmp_path)
