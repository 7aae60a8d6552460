"""Uploads that are interrupted, refused, or use a taken name."""

import re
from pathlib import Path

from tests.support import document_samples as samples
from tests.support.browser import OF_A_STATUS, Reader
from tests.support.gateway_fakes import Behind

FILLER = "Nothing of note is written here, and nothing will be.\n"
LONG = FILLER * 1000 + "amber-12 = 4711\n" + FILLER * 1000
OFFSET = "upload-offset"


def sent(reader: Reader) -> list[int]:
    """Offsets of the sent parts."""
    posts = [each for each in reader.requests if each.method == "POST" and OFFSET in each.headers]
    return [int(each.headers[OFFSET]) for each in posts]


def test_reload_during_upload_resumes_from_the_received_offset(reader: Reader, behind: Behind):
    page = reader.page
    reader.slow_uploads(40_000)
    reader.add(("The long book.txt", LONG))
    page.locator(".sending .numbers", has_text=re.compile(r"^Sending.*6\d(\.\d)? kB of 108 kB sent")).wait_for()
    page.reload()
    reader.slow_uploads(None)
    page.get_by_text("The page was reloaded during the upload.").wait_for()
    parts = len(sent(reader))
    chooser = page.locator(".sending input[type=file]")
    chooser.set_input_files([{"name": "other.txt", "mimeType": "text/plain", "buffer": b"something else"}])
    page.get_by_text("This file has a different size").wait_for()
    chooser.set_input_files([{"name": "The long book.txt", "mimeType": "text/plain", "buffer": LONG.encode()}])
    page.get_by_role("heading", name="The long book").wait_for()
    assert min(sent(reader)[parts:]) >= 64 * 1024
    assert list(behind.tokens().values()) == [len(LONG) + 1]
    assert reader.ask("What is the value of amber-12?") == "amber-12 is 4711"
    reader.audit()


def test_reload_during_prefill_needs_no_file(reader: Reader, behind: Behind):
    page = reader.page
    reader.add(("long.txt", LONG))
    page.locator(".sending .numbers", has_text=re.compile(r"[1-9][\d,]* of 108,017 tokens read")).wait_for()
    page.reload()
    page.locator(".sending .numbers", has_text="tokens/s").wait_for()
    page.get_by_role("heading", name="long").wait_for()
    assert list(behind.tokens().values()) == [len(LONG) + 1]
    page.reload()
    page.get_by_role("heading", name="long").wait_for()
    assert page.locator(".sending").count() == 0
    reader.audit()


def test_several_files_upload_one_after_the_other(reader: Reader, behind: Behind):
    reader.add(("One.txt", FILLER), ("Two.txt", FILLER * 2), ("Drei Äpfel.txt", FILLER * 3))
    for title in ("One", "Two", "Drei Äpfel"):
        reader.page.get_by_role("link", name=title).wait_for()
    assert set(behind.tokens()) == {"one", "two", "drei-apfel"}
    reader.audit()


def test_duplicate_name_is_reported_before_upload(reader: Reader, behind: Behind):
    behind.ingest("notes", "jade-7 = 0815\n" + FILLER)
    page = reader.page
    page.get_by_role("link", name="notes").wait_for()
    reader.choose(("Notes.txt", "amber-12 = 4711\n" + FILLER))
    name = page.get_by_label("Name")
    assert name.input_value() == "notes-2"
    name.fill("No Tes")
    page.get_by_text("Use lower-case letters only.").wait_for()
    add = page.get_by_role("button", name="Upload")
    assert add.is_disabled()
    name.fill("notes")
    page.get_by_text("notes has this name.").wait_for()
    assert add.is_disabled()
    page.get_by_label("Append to the document").check()
    add.click()
    page.get_by_role("heading", name="notes").wait_for()
    assert behind.tokens() == {"notes": 1 + 14 + 16 + 2 * len(FILLER)}
    reader.audit()


def test_name_taken_during_upload_can_be_changed_or_appended_to(reader: Reader, behind: Behind):
    page = reader.page
    page.get_by_role("heading", name="Add your first document").wait_for()
    reader.choose(("notes.txt", FILLER), ("more.txt", FILLER))
    with reader.delayed("**/v1/contexts"):
        behind.ingest("notes", FILLER)
        behind.ingest("more", FILLER)
        page.get_by_role("button", name="Upload").click()
        page.get_by_text("The name notes is taken.").wait_for()
        page.get_by_role("button", name="Use the name notes-2").click()
        page.get_by_text("The name more is taken.").wait_for()
        page.get_by_role("button", name="Append to the document").click()
    behind.wait(
        lambda: behind.tokens() == {"notes": len(FILLER) + 1, "notes-2": len(FILLER) + 1, "more": 2 * len(FILLER) + 1}
    )
    reader.audit(OF_A_STATUS.format(409))


def test_cancelled_prefill_is_not_resumed(reader: Reader, behind: Behind):
    page = reader.page
    behind.ingest("notes", FILLER)
    with behind.frozen_ranks():
        reader.add(("long.txt", LONG))
        page.get_by_text("The upload is complete").wait_for()
        page.get_by_role("button", name="Stop long").click()
        page.locator(".sending").wait_for(state="detached")
    behind.wait_idle()
    page.get_by_role("link", name="notes").click()
    with behind.frozen_ranks():
        add_to_the_end(reader, "more.txt")
        page.get_by_text("The upload is complete").wait_for()
        page.get_by_role("button", name="Stop more").click()
        page.locator(".sending").wait_for(state="detached")
    behind.wait_idle()
    page.reload()
    page.get_by_role("heading", name="notes").wait_for()
    assert page.locator(".sending").count() == 0
    assert behind.tokens() == {"notes": len(FILLER) + 1}
    reader.audit()


def test_cancelled_upload_leaves_nothing(reader: Reader, behind: Behind):
    page = reader.page
    reader.slow_uploads(40_000)
    reader.add(("one.txt", LONG), ("two.txt", FILLER))
    page.locator(".sending .numbers", has_text="kB of 108 kB sent").first.wait_for()
    page.get_by_role("button", name="Stop two").click()  # prefill has not started
    page.get_by_role("button", name="Stop one").click()
    reader.slow_uploads(None)
    page.locator(".sending").wait_for(state="detached")
    deleted = [each.url for each in reader.requests if each.method == "DELETE"]
    assert len(deleted) == 1 and "/v1/contexts/one?" in deleted[0]
    assert behind.tokens() == {}
    reader.audit()


def add_to_the_end(reader: Reader, name: str) -> None:
    file = {"name": name, "mimeType": "text/plain", "buffer": b"amber-12 = 4711\n" + FILLER.encode()}
    with reader.page.expect_file_chooser() as chooser:
        reader.page.get_by_role("button", name="Append…").click()
    chooser.value.set_files([file])
    reader.page.get_by_role("dialog", name="Append to notes").wait_for()
    reader.page.keyboard.press("Enter")


def test_open_document_can_be_appended_to(reader: Reader, behind: Behind):
    behind.ingest("notes", FILLER)
    page = reader.page
    page.get_by_role("link", name="notes").click()
    add_to_the_end(reader, "More.txt")
    page.locator("article .numbers").first.filter(has_text=f"{1 + 2 * len(FILLER) + 16} tokens").wait_for()
    assert reader.ask("What is the value of amber-12?") == "amber-12 is 4711"
    assert behind.tokens() == {"notes": 1 + 2 * len(FILLER) + 16}
    reader.audit()


def test_non_text_file_is_rejected_before_upload(reader: Reader):
    page = reader.page
    bad = [("c.txt", b"caf\xe9 au lait"), ("d.txt", b"")]
    files = [{"name": name, "mimeType": "text/plain", "buffer": content} for name, content in bad]
    page.locator("input[type=file]").first.set_input_files(files)
    for sentence in ("This is not text in UTF-8", "The file is empty."):
        page.get_by_text(sentence).wait_for()
    assert page.get_by_role("button", name="Upload").is_disabled()
    assert sent(reader) == []
    reader.audit()


def test_files_of_other_kinds_are_extracted(reader: Reader, behind: Behind):
    page = reader.page
    contents = [
        ("Report.pdf", samples.pdf(["amber-12 = 4711"])),
        ("Notes.docx", samples.docx(["jade-7 = 0815"])),
        ("Wide.txt", "onyx-3 = 2718\n".encode("utf-16")),
        ("Mark.txt", b"\xef\xbb\xbfopal-9 = 1618\n"),
    ]
    files = [{"name": name, "mimeType": "", "buffer": content} for name, content in contents]
    page.locator("input[type=file]").first.set_input_files(files)
    page.get_by_role("button", name="Upload").click()
    for title in ("Report", "Notes", "Wide", "Mark"):
        page.get_by_role("link", name=title).wait_for()
    assert set(behind.tokens()) == {"report", "notes", "wide", "mark"}
    assert behind.tokens()["mark"] == 1 + len("opal-9 = 1618\n")
    page.get_by_role("link", name="Report").click()
    assert reader.ask("What is the value of amber-12?") == "amber-12 is 4711"
    reader.audit()


def test_folder_becomes_one_document(reader: Reader, behind: Behind, tmp_path: Path):
    folder = tmp_path / "My Notes"
    folder.mkdir()
    (folder / "a.md").write_text("amber-12 = 4711\n")
    (folder / "b.pdf").write_bytes(samples.pdf(["jade-7 = 0815"]))
    (folder / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    (folder / ".env").write_text("secret")
    page = reader.page
    page.locator("input[webkitdirectory]").first.set_input_files(folder)
    page.get_by_role("dialog").get_by_text("3 files").wait_for()
    assert page.get_by_label("Name").input_value() == "my-notes"
    page.get_by_role("button", name="Upload").click()
    page.get_by_role("heading", name="My Notes").wait_for()
    assert reader.ask("What is the value of amber-12?") == "amber-12 is 4711"
    assert set(behind.tokens()) == {"my-notes"}
    card = page.locator(".sending li.card")
    assert "The document is ready." in card.inner_text()
    assert card.locator("details li").all_inner_texts() == ["My Notes/c.png is a PNG image"]
    page.get_by_role("button", name="Dismiss My Notes").click()
    assert page.locator(".sending").count() == 0
    reader.audit()


def test_ready_document_with_left_out_files_is_not_uploaded_again(reader: Reader, behind: Behind, tmp_path: Path):
    """Neither after a reload, nor in place of one that is added later."""
    folder = tmp_path / "Mine"
    folder.mkdir()
    (folder / "a.md").write_text("amber-12 = 4711\n")
    for i in range(7):
        (folder / f"{i}.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    page = reader.page
    page.locator("input[webkitdirectory]").first.set_input_files(folder)
    page.get_by_role("button", name="Upload").click()
    page.get_by_text("The document is ready.").wait_for()
    page.get_by_text("Left out", exact=True).click()
    page.get_by_text("Mine/6.png is a PNG image").wait_for()
    reader.add(("b.txt", FILLER))
    page.get_by_role("link", name="b", exact=False).first.wait_for()
    behind.wait(lambda: set(behind.tokens()) == {"mine", "b"})
    page.get_by_text("Mine/6.png is a PNG image").wait_for()
    page.reload()
    page.get_by_role("heading", name="Mine").wait_for()
    assert page.locator(".sending").count() == 0
    assert set(behind.tokens()) == {"mine", "b"}
    reader.audit()


def test_file_that_cannot_be_extracted_is_reported(reader: Reader):
    page = reader.page
    files = [{"name": "scan.pdf", "mimeType": "application/pdf", "buffer": samples.pdf([""])}]
    page.locator("input[type=file]").first.set_input_files(files)
    page.get_by_role("button", name="Upload").click()
    page.get_by_role("alert").filter(has_text="has 1 page and no text").wait_for()
    files = [{"name": "x.pdf", "mimeType": "application/pdf", "buffer": b"GIF89a\0\0"}]
    page.locator("input[type=file]").first.set_input_files(files)
    page.get_by_role("button", name="Upload").click()
    page.get_by_role("alert").filter(has_text="This file cannot be read: x.pdf is a GIF image.").wait_for()
    reader.audit(OF_A_STATUS.format(415))


def test_non_text_content_found_during_upload_is_reported(reader: Reader):
    reader.choose(("late.txt", FILLER * 2000))
    reader.page.get_by_role("button", name="Cancel").click()
    bad = {"name": "late.txt", "mimeType": "text/plain", "buffer": (FILLER * 2000).encode() + b"\xff\xff"}
    reader.page.locator("input[type=file]").first.set_input_files([bad])
    reader.page.get_by_role("button", name="Upload").click()
    reader.page.get_by_role("alert").filter(has_text="The request is invalid").wait_for()
    reader.page.get_by_role("button", name="Dismiss late").click()
    assert reader.page.locator(".sending").count() == 0
    reader.audit(OF_A_STATUS.format(400))


def test_file_dropped_anywhere_on_the_page_is_added(reader: Reader):
    page = reader.page
    made = (
        "const data = new DataTransfer(); data.items.add(new File(['amber-12 = 4711\\n'], 'Dropped.md')); return data;"
    )
    transfer = page.evaluate_handle(f"() => {{ {made} }}")
    page.dispatch_event("main", "dragover", {"dataTransfer": transfer})
    page.get_by_text("Drop files or folders to add them").wait_for()
    page.dispatch_event("main", "drop", {"dataTransfer": transfer})
    assert page.get_by_label("Name").input_value() == "dropped"
    page.get_by_role("button", name="Upload").click()
    page.get_by_role("heading", name="Dropped").wait_for()
    reader.audit()
