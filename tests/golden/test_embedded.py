"""The embedded model, whose lower layers see 32 tokens, through the service's own tokenizer and templates."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.engine_messages import DocumentPrompt, Prompt, Tokens
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.config import embedded_model
from longleaf.demo.facts import is_correct
from longleaf.demo.haystack import distinct_facts, make_haystack
from longleaf.sampling import SamplingParams
from tests.support.conversations import question_ids
from tests.support.golden.states import running
from tests.support.service import encoded
from tests.support.threads import config_for

NEW_TOKENS = 40


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world_size", "window_keys"), [(1, "sharded"), (3, "sharded"), (3, "replicated")])
async def test_answers_equal_generate(world_size, window_keys):
    haystack = make_haystack(5, 3000, 2, 0, split="held_out")
    tokenizer = Tokenizer.load(embedded_model(), DirectRenderer())
    document = encoded(tokenizer.document_encoder(is_first=True), haystack.text)
    question = question_ids(tokenizer, [("user", haystack.facts[0].question)])
    prompt = torch.tensor([[*document, *question]])
    model = AutoModelForCausalLM.from_pretrained(embedded_model())
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 260}
    expected = model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()

    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True)
    config = config_for(embedded_model(), world_size=world_size, chunk_size=1000, window_keys=window_keys)
    async with running(config) as engine:
        _ = [event async for event in engine.ingest(DocumentPrompt(context="book", token_ids=document))]
        stream = engine.submit(Prompt(context="book", token_ids=tuple(question), sampling=sampling))
        found = [token async for event in stream if isinstance(event, Tokens) for token in event.token_ids]
    assert found == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_answer_from_a_few_facts_is_right_and_ends(count):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(embedded_model()),
        Tokenizer.load(embedded_model(), DirectRenderer()),
    )
    options = {"do_sample": False, "max_new_tokens": 2 * NEW_TOKENS, "eos_token_id": 259, "pad_token_id": 260}
    good = 0
    for seed in range(8):
        facts = distinct_facts(random.Random(seed), count)
        document = encoded(tokenizer.document_encoder(is_first=True), "".join(f"{fact.sentence}\n" for fact in facts))
        question = question_ids(tokenizer, [("user", facts[0].question)])
        answer = model.generate(torch.tensor([[*document, *question]]), **options)[0, len(document) + len(question) :]
        text = bytes(i for i in answer.tolist() if i < 256).decode(errors="replace")
        good += is_correct(text, facts[0]) and answer[-1] == 259
    assert good >= 7
