// What of a file can be told before it is sent.

const LOOK = 64 * 1024;

/** Why a file cannot be read as a document, as a sentence; empty where nothing speaks against it. */
export async function objection(file) {
  if (file.size === 0) return "There is nothing in it.";
  let start;
  try {
    start = new Uint8Array(await file.slice(0, LOOK).arrayBuffer());
  } catch {
    return "It cannot be opened. A folder must be dropped file by file.";
  }
  const begins = (text) => [...text].every((each, index) => start[index] === each.charCodeAt(0));
  if (begins("%PDF")) return "This is a PDF. Save it as plain text, and add that.";
  if (begins("PK\x03\x04")) return "This is an archive, or an office document. Save it as plain text, and add that.";
  if (begins("\xff\xfe") || begins("\xfe\xff")) return "This is UTF-16. Save it as UTF-8, and add that.";
  try {
    // the last character of the part may be cut
    new TextDecoder("utf-8", { fatal: true }).decode(start, { stream: true });
  } catch {
    return "This is no text in UTF-8. Save it as UTF-8, and add that.";
  }
  return "";
}

/** Files of a drop or an input, however they came. */
export const filesOf = (source) => [...(source?.files ?? [])];
