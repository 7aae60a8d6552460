// Names of contexts: derived from what a file is called, and held to the service's rule.

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

/** The name, or the name with the lowest number behind it that nobody has. */
export function freeName(name, taken) {
  if (!taken.has(name)) return name;
  const stem = name.replace(/-\d{1,4}$/, "") || name;
  for (let number = 2; ; number += 1) {
    const next = `${trim(stem.slice(0, LONGEST - 6))}-${number}`;
    if (!taken.has(next)) return next;
  }
}

/** What is wrong with a name, as a sentence; empty where it can be had. */
export function complaint(name) {
  if (name === "") return "Give it a name.";
  if (name.length > LONGEST) return `A name has at most ${LONGEST} characters; this one has ${name.length}.`;
  if (RULE.test(name)) return "";
  if (/[A-Z]/.test(name)) return "Use small letters only.";
  if (/[^a-z0-9._-]/.test(name)) return "Use the letters a to z, digits, dots, hyphens and underscores only.";
  return "Begin and end with a letter or a digit.";
}

const trim = (name) => name.replace(/^[._-]+|[._-]+$/g, "");
