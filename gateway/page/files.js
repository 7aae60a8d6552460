// Files before their upload: their kinds, the files of folders, and names of documents.

const LOOK = 64 * 1024;
// limits of the gateway
const MOST_FILES = 256;
const MOST_BYTES = 256 * 1024 * 1024;
const OFFICE = "application/vnd.openxmlformats-officedocument";
const TYPES = {
  pdf: "application/pdf",
  docx: `${OFFICE}.wordprocessingml.document`,
  pptx: `${OFFICE}.presentationml.presentation`,
  html: "text/html",
  htm: "text/html",
  xhtml: "text/html",
  epub: "application/epub+zip",
  ipynb: "application/x-ipynb+json",
  zip: "application/zip",
  tar: "application/x-tar",
  tgz: "application/gzip",
  gz: "application/gzip",
  bz2: "application/x-bzip2",
  xz: "application/x-xz",
};
const BOM = [0xef, 0xbb, 0xbf];

/** The files of a folder, which become one document: {name, size, files: [{file, path}]}. */
export const isFolder = (source) => Array.isArray(source.files);

/** How a file is uploaded: its `objection` as a sentence, or ""; its media `type`, or "" for UTF-8 text, which is sent in
 * parts; and its `body`, which is the file without a byte order mark. */
export async function inspect(source) {
  if (isFolder(source)) return { objection: objectionToFolder(source), type: "multipart/form-data", body: source };
  const refused = (objection) => ({ objection, type: "", body: source });
  if (source.size === 0) return refused("The file is empty.");
  let start;
  try {
    start = new Uint8Array(await source.slice(0, LOOK).arrayBuffer());
  } catch {
    return refused("The file cannot be opened.");
  }
  const begins = (...bytes) => bytes.every((byte, index) => start[index] === byte);
  const named = TYPES[source.name.toLowerCase().match(/\.([a-z0-9]+)$/)?.[1]];
  const type = begins(0x25, 0x50, 0x44, 0x46) ? TYPES.pdf
    : named ?? (begins(0x50, 0x4b, 3, 4) ? TYPES.zip
    : begins(0xff, 0xfe) || begins(0xfe, 0xff) ? "text/plain; charset=utf-16" : "");
  if (type) return source.size > MOST_BYTES ? refused("The file is larger than 256 MiB.") : { objection: "", type, body: source };
  try {
    // the last character may be incomplete
    new TextDecoder("utf-8", { fatal: true }).decode(start, { stream: true });
  } catch {
    return refused("This is not text in UTF-8, and of no other kind that can be read. Save it as UTF-8, or as PDF.");
  }
  return { objection: "", type: "", body: begins(...BOM) ? source.slice(BOM.length) : source };
}

function objectionToFolder({ files, size }) {
  if (!files.length) return "The folder has no files.";
  if (files.length > MOST_FILES) return `The folder has more than ${MOST_FILES} files.`;
  return size > MOST_BYTES ? "The files of the folder are larger than 256 MiB together." : "";
}

function folderOf(name, files) {
  const shown = files.filter(({ path }) => !path.split("/").some((part) => part.startsWith(".")));
  return { name, size: shown.reduce((sum, { file }) => sum + file.size, 0), files: shown };
}

/** The files of an input; those of a folder input are one folder. */
export function chosenIn(input) {
  const files = [...input.files];
  if (!input.webkitdirectory || !files.length) return files;
  const [{ webkitRelativePath }] = files;
  return [folderOf(webkitRelativePath.split("/")[0], files.map((file) => ({ file, path: file.webkitRelativePath })))];
}

/** The files and folders of a drop. */
export async function filesOf(transfer) {
  // entries are only there until the event ends
  const entries = [...(transfer?.items ?? [])].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return [...(transfer?.files ?? [])];
  return Promise.all(entries.map(async (entry) => {
    if (entry.isFile) return fileOf(entry);
    return folderOf(entry.name, await filesBelow(entry, entry.name));
  }));
}

const fileOf = (entry) => new Promise((resolve, reject) => entry.file(resolve, reject));

async function filesBelow(folder, path, found = []) {
  const reader = folder.createReader();
  for (;;) {
    // a reader returns at most 100 entries at once
    const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!entries.length || found.length > MOST_FILES) return found;
    for (const entry of entries) {
      const below = `${path}/${entry.name}`;
      if (entry.name.startsWith(".")) continue;
      if (entry.isDirectory) await filesBelow(entry, below, found);
      else found.push({ file: await fileOf(entry), path: below });
    }
  }
}

/** The body of a request with a file or a folder. */
export function bodyOf(source) {
  if (!isFolder(source)) return source;
  const form = new FormData();
  for (const { file, path } of source.files) form.append("file", file, path);
  return form;
}

// The service's rule for names of contexts.
const RULE = /^[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?$/;
const LONGEST = 63;

const SUFFIX = /\.(txt|text|md|markdown|rst|x?html?|xml|csv|json|log|tex|srt|pdf|docx|docm|pptx|pptm|epub|ipynb|zip|whl|tgz|tbz2|txz|tar(\.(gz|bz2|xz))?)$/i;

/** The name of a file without the suffix of a document; "Notes.2024" has none. */
export const stemOf = (file) => file.replace(SUFFIX, "");

/** "Moby Dick (1851).txt" is moby-dick-1851. */
export function nameOf(file) {
  const plain = stemOf(file)
    .replaceAll("ß", "ss")
    .normalize("NFKD")
    .replace(/\p{M}/gu, "")
    .toLowerCase()
    .replace(/[^a-z0-9._]+/g, "-");
  return trim(plain.slice(0, LONGEST)) || "document";
}

/** The name, or the name with the lowest unused number. A number at its end, such as a year, is kept, unless it may be
 * that of an earlier proposal. */
export function freeName(name, taken) {
  if (!taken.has(name)) return name;
  const [, numbered] = name.match(/^(.+)-\d{1,3}$/) ?? [];
  const stem = taken.has(numbered) ? numbered : name;
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
