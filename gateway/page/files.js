// Checks of files before the upload, and names of documents.

const LOOK = 64 * 1024;

/** The reason why a file is not a text document, as a sentence; "" if there is none. */
export async function objection(file) {
  if (file.size === 0) return "The file is empty.";
  let start;
  try {
    start = new Uint8Array(await file.slice(0, LOOK).arrayBuffer());
  } catch {
    return "The file cannot be opened. For a folder, drop its files.";
  }
  const begins = (text) => [...text].every((each, index) => start[index] === each.charCodeAt(0));
  if (begins("%PDF")) return "This is a PDF. Save it as plain text, and add that file.";
  if (begins("PK\x03\x04")) return "This is an archive or an Office document. Save it as plain text, and add that file.";
  if (begins("\xff\xfe") || begins("\xfe\xff")) return "This is UTF-16. Save it as UTF-8, and add that file.";
  try {
    // the last character may be incomplete
    new TextDecoder("utf-8", { fatal: true }).decode(start, { stream: true });
  } catch {
    return "This is not UTF-8 text. Save it as UTF-8, and add that file.";
  }
  return "";
}

/** The files of a drop or an input. */
export const filesOf = (source) => [...(source?.files ?? [])];

// The service's rule for names of contexts.
const RULE = /^[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?$/;
const LONGEST = 63;

/** "Moby Dick (1851).txt" is moby-dick-1851. */
export function nameOf(file) {
  const plain = file
    .replace(/\.(txt|text|md|markdown|rst|html?|xml|csv|json|log|tex|srt)$/i, "")
    .replaceAll("ß", "ss")
    .normalize("NFKD")
    .replace(/\p{M}/gu, "")
    .toLowerCase()
    .replace(/[^a-z0-9._]+/g, "-");
  return trim(plain.slice(0, LONGEST)) || "document";
}

/** The name, or the name with the lowest unused number. */
export function freeName(name, taken) {
  if (!taken.has(name)) return name;
  const stem = name.replace(/-\d{1,4}$/, "") || name;
  for (let number = 2; ; number += 1) {
    const next = `${trim(stem.slice(0, LONGEST - 6))}-${number}`;
    if (!taken.has(next)) return next;
  }
}

/** The error of a name, as a sentence; "" if it is valid. */
export function complaint(name) {
  if (name === "") return "Enter a name.";
  if (name.length > LONGEST) return `A name has at most ${LONGEST} characters; this one has ${name.length}.`;
  if (RULE.test(name)) return "";
  if (/[A-Z]/.test(name)) return "Use lower-case letters only.";
  if (/[^a-z0-9._-]/.test(name)) return "Use the letters a to z, digits, dots, hyphens and underscores only.";
  return "Begin and end with a letter or a digit.";
}

const trim = (name) => name.replace(/^[._-]+|[._-]+$/g, "");
