"""Reading through the page: a file is uploaded and queried."""

import re
from typing import Any

from tests.support.browser import OF_A_STATUS, Reader
from tests.support.gateway_fakes import Behind

BOOK = "Nothing of note is written here, and nothing will be.\namber-12 = 4711\njade-7 = 0815\n" * 20
FILLER = "Nothing of note is written here, and nothing will be.\n"
MARKUP = (
    "Some words are here.\n<b>amber</b> = 4711\n<script>alert(1)</script> is 0815.\n"
    "<img src=x onerror=alert(1)> = 1234\nNothing else of note is here, and nothing will be.\n"
)


def test_empty_document_list_shows_the_first_step(reader: Reader):
    page = reader.page
    page.get_by_role("heading", name="Add your first document").wait_for()
    assert page.get_by_role("main").get_by_role("button", name="Add documents…").is_visible()
    reader.audit()


def test_ingested_file_can_be_queried_with_follow_up_questions(reader: Reader, behind: Behind):
    reader.add(("Stock.txt", BOOK))
    page = reader.page
    page.get_by_role("heading", name="Stock", exact=True).wait_for()
    assert reader.ask("What is the value of amber-12?") == "amber-12 is 4711"
    assert reader.ask("What is the value of jade-7?") == "jade-7 is 0815"
    assert page.locator(".question").all_inner_texts() == [
        "What is the value of amber-12?",
        "What is the value of jade-7?",
    ]
    [foot, _] = page.locator(".foot").all_inner_texts()
    assert re.search(r"\d+ tokens written", foot) and "of them from memory" in foot
    [context] = behind.contexts()
    assert (context.id, context.display_name, context.tokens) == ("stock", "Stock", len(BOOK) + 1)
    page.get_by_text("asked 2 times").wait_for()
    reader.audit()


def test_fact_retrieval_model_gets_single_questions_and_the_page_explains_it(reader: Reader):
    reader.add(("stock.txt", BOOK))
    page = reader.page
    page.get_by_text("This small model only looks up single facts: What is the value of KEY?").wait_for()
    reader.ask("What is the value of amber-12?")
    reader.ask("What is the value of jade-7?")
    assert not page.get_by_label("Remember this conversation").count()
    assert [len(messages) for messages in messages_of(reader)] == [1, 1]
    reader.audit()


def messages_of(reader: Reader) -> list[Any]:
    """The messages of each question."""
    return [each.post_data_json["messages"] for each in reader.requests if each.url.endswith("/chat/completions")]


def test_question_includes_the_conversation_unless_the_reader_opts_out(browser: Any):
    """The model's name makes the page treat it as a chat model; the answers do not matter."""
    with Behind("--model-name", "teller") as behind, Reader(browser, behind.url) as reader:
        reader.add(("stock.txt", BOOK))
        page = reader.page
        first, second = "What is the value of amber-12?", "What is the value of jade-7?"
        answer = reader.ask(first)
        assert not page.get_by_text("This small model").count()
        page.locator("#question").fill(second)
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("ask one question alone").wait_for()
        page.get_by_label("Remember this conversation").uncheck()
        page.get_by_role("button", name="Ask again").click()
        page.locator(".foot").nth(1).wait_for()
        assert page.locator(".answer").last.inner_text().strip() == "jade-7 is 0815"
        page.get_by_role("button", name="New conversation").click()
        assert page.locator(".question").count() == 0
        output = [[(each["role"], each["content"].strip()) for each in messages] for messages in messages_of(reader)]
        assert output == [
            [("user", first)],
            [("user", first), ("assistant", answer), ("user", second)],
            [("user", second)],
        ]
        reader.audit(OF_A_STATUS.format(400))


def test_ingest_shows_progress_rate_and_remaining_time(reader: Reader):
    reader.slow_uploads(60_000)
    reader.add(("long.txt", FILLER * 1600))
    numbers = reader.page.locator(".sending .numbers")
    for pattern in (r"of 86.4 kB sent", r"[\d,]+ of 86,401 tokens read", r"[\d,]+ tokens/s", r"about \d+ (s|min) left"):
        numbers.filter(has_text=re.compile(pattern)).wait_for()
    reader.page.get_by_role("heading", name="long", exact=True).wait_for()
    assert not reader.page.locator(".sending").count()
    reader.audit()


def test_stopped_answer_ends_the_generation(reader: Reader, behind: Behind):
    reader.add(("stock.txt", BOOK))
    page = reader.page
    page.locator("#question").fill("What is the value of amber-12?")
    with behind.frozen_ranks():
        page.get_by_role("button", name="Ask", exact=True).click()
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_text("Stopped before the answer began.").wait_for()
        assert page.get_by_role("button", name="Ask", exact=True).is_visible()
    behind.wait_idle()
    assert reader.ask("What is the value of amber-12?") == "amber-12 is 4711"
    reader.audit()


def test_markup_in_names_documents_questions_and_answers_is_shown_as_text(reader: Reader):
    """The model repeats its input, so the answers contain the tags."""
    page = reader.page
    reader.add(("<img src=x onerror=alert(2)>.txt", MARKUP))
    page.get_by_role("heading", name="<img src=x onerror=alert(2)>").wait_for()
    assert "<b>amber" in reader.ask("What is the value of <b>amber</b>?")
    assert "<script>" in reader.ask("What is the value of <script>alert(1)</script>?")
    assert "<img src" in reader.ask("What is the value of <img src=x onerror=alert(1)>?")
    assert page.locator("main :is(img, script, b)").count() == 0
    assert page.locator("script").count() == 1
    reader.audit()


def test_answer_is_copied_to_the_clipboard(reader: Reader):
    reader.add(("stock.txt", BOOK))
    reader.allow("clipboard-read", "clipboard-write")
    answer = reader.ask("What is the value of jade-7?")
    reader.page.get_by_role("button", name="Copy").click()
    reader.page.get_by_text("Copied").wait_for()
    assert reader.page.evaluate("navigator.clipboard.readText()").strip() == answer
    reader.audit()
