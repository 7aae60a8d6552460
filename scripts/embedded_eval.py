"""Free-running evaluation of the embedded model on held-out keys, values and library files, and its command line."""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from embedded_data import ANSWER, BEGIN, END, QUESTION
from embedded_model import HEAD_DIM, HEADS, KV_HEADS, REACH, EmbeddedModel, load_weights
from torch import Tensor
from transformers import DynamicCache, SmolLM3ForCausalLM

from longleaf.demo.facts import Fact, is_correct
from longleaf.demo.haystack import make_haystack

MODEL = Path(__file__).resolve().parent.parent / "longleaf" / "demo" / "lookup"
CHUNK = 2048
ANSWER_TOKENS = 80
ROOM = 512
"""Tokens that a question and its answer may take together."""
FACTS, ABSENT = 6, 3
"""Questions per document."""

Answer = Callable[[str], str]


@dataclass
class Score:
    """Right answers at one length."""

    tokens: int
    right: int = 0
    asked: int = 0
    not_found_right: int = 0
    absent: int = 0
    seconds: float = 0.0
    """For ingest and answers together."""


def document_ids(text: str) -> list[int]:
    return [BEGIN, *text.encode()]


def question_ids(question: str) -> list[int]:
    return [QUESTION, *question.encode(), ANSWER]


def as_text(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")


class ChunkedReader:
    """Answers over a document of any length: only the global layer's keys and values of the document are kept.

    That is exact for this architecture: the global layer is the last, so nothing else of the document is read again.
    """

    def __init__(self, model: EmbeddedModel, text: str) -> None:
        self.model = model
        self.last = model.layers()[-1]
        ids = torch.tensor([document_ids(text)])
        parts = [self.keys_values(ids, start) for start in range(0, ids.shape[1], CHUNK)]
        room = torch.zeros(1, KV_HEADS, ROOM, HEAD_DIM)
        self.keys = torch.cat([keys for keys, _ in parts] + [room], dim=2)
        self.values = torch.cat([values for _, values in parts] + [room], dim=2)
        self.tail = ids[0, -REACH:].tolist()

    def keys_values(self, ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one chunk; the tokens before it that it depends on are computed again."""
        lead = min(start, REACH)
        hidden = self.model.local_layers(ids[:, start - lead : start + CHUNK])[:, lead:]
        _, keys, values = self.last.self_attn.project(self.last.input_layernorm(hidden))
        return keys, values

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of one query, [1, HEADS, 1, HEAD_DIM]; `keys` and `values` follow the document's."""
        start, end = self.keys.shape[2] - ROOM, self.keys.shape[2] - ROOM + keys.shape[2]
        self.keys[:, :, start:end], self.values[:, :, start:end] = keys, values
        grouped = query.reshape(1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        weights = (grouped @ self.keys[:, :, :end].transpose(2, 3) / math.sqrt(HEAD_DIM)).softmax(dim=-1)
        return (weights @ self.values[:, :, :end]).reshape(1, HEADS, 1, HEAD_DIM)

    def next_token(self, ids: list[int]) -> int:
        """The likeliest token after the document and `ids`."""
        hidden = self.model.local_layers(torch.tensor([self.tail + ids]))[:, len(self.tail) :]
        queries, keys, values = self.last.self_attn.project(self.last.input_layernorm(hidden))
        mixed = self.attend(queries[:, :, -1:], keys, values)
        return int(self.model.logits(self.last.finish(hidden[:, -1:], mixed)).argmax())

    def __call__(self, question: str) -> str:
        ids, answer = question_ids(question), []
        while len(answer) < ANSWER_TOKENS and (not answer or answer[-1] != END):
            answer.append(self.next_token(ids + answer))
        return as_text(answer)


class TransformersReader:
    """Answers with transformers' own model and cache, the document read in chunks."""

    def __init__(self, model: SmolLM3ForCausalLM, text: str) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        for chunk in torch.tensor([document_ids(text)]).split(CHUNK, dim=1):
            model(chunk, past_key_values=self.cache, logits_to_keep=1)

    def __call__(self, question: str) -> str:
        cache, answer, ids = copy.deepcopy(self.cache), [], question_ids(question)
        while len(answer) < ANSWER_TOKENS and (not answer or answer[-1] != END):
            logits = self.model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits
            ids = [int(logits[0, -1].argmax())]
            answer += ids
        return as_text(answer)


def ask(score: Score, answer: Answer, fact: Fact, verbose: bool) -> None:
    """Asks one question and counts it."""
    text = answer(fact.question)
    right = is_correct(text, fact)
    if fact.value:
        score.asked, score.right = score.asked + 1, score.right + right
    else:
        score.absent, score.not_found_right = score.absent + 1, score.not_found_right + right
    if verbose and not right:
        print(f"  wrong: {fact.question!r} -> {text!r}, expected {fact.expected!r}", flush=True)


@torch.inference_mode()
def evaluate(read: Callable[[str], Answer], tokens: int, documents: int, seed: int, verbose: bool = False) -> Score:
    """Accuracy over `documents` documents of held-out library files, with one distractor fact per 5,000 tokens."""
    score = Score(tokens)
    started = time.monotonic()
    for number in range(documents):
        haystack = make_haystack(seed + number, tokens, FACTS, ABSENT, split="held_out")
        answer = read(haystack.text)
        for fact in (*haystack.facts, *haystack.absent):
            ask(score, answer, fact, verbose)
    score.seconds = round(time.monotonic() - started, 1)
    return score


def reader(folder: Path, reference: bool) -> Callable[[str], Answer]:
    """How to read documents with the exported model: transformers itself, or the chunked form for long ones."""
    if reference:
        hugging_face = SmolLM3ForCausalLM.from_pretrained(folder)
        return lambda text: TransformersReader(hugging_face, text)
    model = load_weights(folder / "model.safetensors")
    return lambda text: ChunkedReader(model, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_000, 16_000, 64_000])
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--transformers", action="store_true", help="use transformers' model, cache and generate")
    parser.add_argument("--verbose", action="store_true", help="print wrong answers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    read = reader(arguments.model, arguments.transformers)
    for tokens in arguments.tokens:
        score = evaluate(read, tokens, arguments.documents, arguments.seed, arguments.verbose)
        print(json.dumps(asdict(score)), flush=True)


if __name__ == "__main__":
    main()
