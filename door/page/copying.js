// Text into the clipboard.

/** Whether it could be done. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // plain HTTP in a local network has no clipboard of its own
  }
}

function copyBySelection(text) {
  const before = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  before?.focus();
  return isDone;
}
