"""Files of a model folder that the coordinator reads besides the tokenizer: small JSON files and the chat template."""

import json
from pathlib import Path
from typing import Any, cast

import msgspec

from longleaf.errors import InvalidArgument, ModelRefused
from longleaf.sampling import SamplingParams

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model folder. `vocabulary_size` and `max_positions` are 0 if the config does not define them."""

    folder: Path
    architecture: str
    quantization: str = ""
    """Method by which the weights are quantized; empty if they are not."""
    vocabulary_size: int
    max_positions: int
    end_tokens: frozenset[int]
    """End tokens of generation_config.json, else of config.json; the tokenizer may have a different one."""
    chat_template: str | None
    tool_template: str | None = None
    """A separate chat template for requests with tools."""
    document_separator: str | None
    """Text between document and question, control tokens recognised."""
    special_tokens: dict[str, str]
    """Texts that chat templates may name, such as bos_token."""

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Raises ModelRefused when the folder or its config is missing or unreadable."""
        if not folder.is_dir():
            raise ModelRefused(f"model folder {folder} does not exist")
        if not (folder / "config.json").is_file():
            raise ModelRefused(f"{folder} is not a checkpoint: it has no config.json")
        config = _read_json(folder / "config.json")
        text_config = config | _as_dict(config.get("text_config"))
        settings = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        return cls(
            folder=folder,
            architecture=str(next(iter(config.get("architectures") or ()), "")),
            quantization=str(_as_dict(text_config.get("quantization_config")).get("quant_method") or ""),
            vocabulary_size=int(text_config.get("vocab_size") or 0),
            max_positions=int(text_config.get("max_position_embeddings") or text_config.get("n_positions") or 0),
            end_tokens=_end_tokens(generation.get("eos_token_id", text_config.get("eos_token_id"))),
            chat_template=_chat_template(folder, settings),
            tool_template=_tool_template(folder, settings),
            document_separator=settings.get("document_separator"),
            special_tokens=_special_tokens(folder, settings),
        )


class _Recommended(msgspec.Struct, frozen=True):
    """Fields of generation_config.json. Its other fields do not affect how a token is sampled."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_sampling(folder: Path) -> SamplingParams:
    """Sampling parameters of generation_config.json; parameters that it omits keep their defaults here.

    As in transformers, sampling is off unless `do_sample` is true, and then has temperature 1 by default; but the
    default top-k is not 50. Raises ModelRefused for a file that cannot be read, or has values out of range.
    """
    path = folder / "generation_config.json"
    try:
        found = msgspec.convert(_read_json(path), _Recommended)
        given = {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}
        if not given.pop("do_sample", False):
            given = {name: value for name, value in given.items() if name == "repetition_penalty"}
        elif "temperature" not in given:
            given["temperature"] = 1.0
        sampling = SamplingParams(**given)
        sampling.check()
    except msgspec.ValidationError as error:
        message, _, field = str(error).rpartition(" - at ")
        raise ModelRefused(f"{path}: {field.strip('`').removeprefix('$.')}: {message}") from error
    except InvalidArgument as error:
        raise ModelRefused(f"{path}: {str(error).removeprefix('sampling.')}") from error
    return sampling


def _as_dict(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when the file does not exist."""
    try:
        return _as_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error


def _end_tokens(value: object) -> frozenset[int]:
    """One id, several, or none."""
    values = cast(list[object], value) if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in values if isinstance(token_id, int))


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Reads the template from the files that transformers uses: a separate file, the tokenizer's settings, or those of
    a processor."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelRefused(f"{path} cannot be read: {error}") from error
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several templates, by name
        named = {entry.get("name"): entry.get("template") for entry in map(_as_dict, cast(list[object], template))}
        if "default" not in named:
            names = ", ".join(sorted(map(str, named)))
            raise ModelRefused(f"{folder} has several chat templates ({names}), and none is named default")
        template = named["default"]
    return template if isinstance(template, str) else None


def _tool_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The template named tool_use, from the places where transformers looks for it."""
    path = folder / "additional_chat_templates" / "tool_use.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelRefused(f"{path} cannot be read: {error}") from error
    templates = settings.get("chat_template")
    entries = map(_as_dict, cast(list[object], templates)) if isinstance(templates, list) else ()
    found = next((entry.get("template") for entry in entries if entry.get("name") == "tool_use"), None)
    return found if isinstance(found, str) else None


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Names that transformers gives to chat templates: the usual ones, further `*_token` of the tokenizer's settings,
    and named `extra_special_tokens`. A token is its text, or an object that has it."""
    values = {name: value for name, value in settings.items() if name.endswith("_token")}
    values |= _as_dict(settings.get("extra_special_tokens"))
    if "added_tokens_decoder" not in settings:  # an earlier format
        previous = _read_json(folder / "special_tokens_map.json")
        values |= {name: value for name, value in previous.items() if name in SPECIAL_TOKENS}
        values |= _as_dict(previous.get("extra_special_tokens"))
    texts = {name: _as_dict(value).get("content", value) for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
