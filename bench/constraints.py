"""The cost of a constraint: decode steps of one constrained answer against those of one without a constraint.

A random Llama with SmolLM2's body and 152,000 ids runs on one thread; both answers take turns. The constraint is a JSON
Schema with a long string, so that no answer ends early. Usage:

    python -m bench.constraints --json
    python -m bench.constraints --tokens 64 --repeats 9
"""

import argparse
import json
import random
import string
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.service import client_of
from coordinator.grammars.source import grammar_of
from longleaf.client import Client
from longleaf.config import EngineConfig
from longleaf.grammars.matcher import GrammarMatcher
from longleaf.grammars.vocabulary import read_vocabulary
from longleaf.types import Constraint, Finished, json_schema

TARGET = 0.1
"""Share of a step that a constraint may cost."""
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 100_000}, "size": {"type": "integer"}},
    "required": ["text", "size"],
    "additionalProperties": False,
}
END = "<|end|>"


def make_model(folder: Path, vocabulary_size: int) -> None:
    """A random model, and a byte-level tokenizer of words."""
    source, names = random.Random(0), [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    known = set(names)
    while len(names) < vocabulary_size - 1:
        word = source.choice(("", "Ġ")) + "".join(source.choices(string.ascii_letters, k=source.randint(2, 8)))
        if word not in known:
            known.add(word)
            names.append(word)
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary_size - 1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def step_ms(client: Client, tokens: int, constraint: Constraint | None) -> float:
    """Milliseconds per step of one greedy answer."""
    options = {"ignore_end_token": True} if constraint is None else {"constraint": constraint}
    for event in client.generate(list(range(100, 140)), max_tokens=tokens, **options):  # pyright: ignore[reportArgumentType]
        if isinstance(event, Finished):
            if event.usage.completion_tokens != tokens:
                raise RuntimeError(f"the answer ended after {event.usage.completion_tokens} tokens: {event.reason}")
            return 1000 * event.timings.decode_seconds / (tokens - 1)
    raise RuntimeError("the answer has no end")


def mask_costs(folder: Path, constraint: Constraint, tokens: int) -> dict[str, float]:
    """Processor time of the parts of a constraint in milliseconds; for masks, the median and the largest."""
    began = time.process_time()
    vocabulary = read_vocabulary(folder)
    read = time.process_time()
    matcher = GrammarMatcher(vocabulary, grammar_of(constraint), ())
    compiled = time.process_time()
    masks = list[float]()
    for _ in range(tokens):
        before = time.process_time()
        mask = matcher.allowed(vocabulary.size)
        matcher.accept(int(mask.nonzero()[0][0]))
        masks.append(time.process_time() - before)
    return {
        "vocabulary_ms": round(1000 * (read - began), 1),
        "compile_ms": round(1000 * (compiled - read), 2),
        "mask_ms": round(1000 * median(masks), 3),
        "largest_mask_ms": round(1000 * max(masks), 3),
    }


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(
        "python -m bench.constraints", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each side")
    given = parser.parse_args()
    constraint = json_schema(SCHEMA)
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, given.vocabulary)
        config = EngineConfig(model=name, max_draft_tokens=0, verify_model=False, kv_bytes=200_000_000)
        free, bound = list[float](), list[float]()
        with client_of(None, config, "local") as client:
            for turn in range(given.repeats + 1):
                free.append(step_ms(client, given.tokens, None))
                bound.append(step_ms(client, given.tokens, constraint))
                log(f"turn {turn}: {free[-1]:.2f} and {bound[-1]:.2f} ms per step")
        costs = mask_costs(folder, constraint, given.tokens)
    shares = [ours / theirs - 1 for theirs, ours in zip(free[1:], bound[1:], strict=True)]
    found = {
        "bench": "constraints",
        "vocabulary": given.vocabulary,
        "tokens": given.tokens,
        "step_ms": round(median(free[1:]), 2),
        "constrained_step_ms": round(median(bound[1:]), 2),
        "share": round(median(shares), 3),
        "share_min": round(min(shares), 3),
        "share_max": round(max(shares), 3),
        "target": TARGET,
        **costs,
        "machine": describe(),
    }
    print(json.dumps(found, indent=2) if given.json else found)


if __name__ == "__main__":
    main()
