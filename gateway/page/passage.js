// The part of a document around a source, divided into the text before the source, the source, and the text after it.

/** `found` is {text, byte_start, byte_end}, the text around; `source` has `bytes`, its range in the document, or its `text`. If the
 * source is not in it, all of it is the source. The chat template before a document, whose tokens have a text, but no
 * bytes of it, is left out. */
export function divide({ text: spelled, byte_start: start, byte_end: end }, { bytes, text: own }) {
  const spelledBytes = new TextEncoder().encode(spelled);
  const all = spelledBytes.subarray(start === 0 ? Math.max(0, spelledBytes.length - end) : 0);
  const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(all);
  const [first, last] = (bytes ?? []).map((each) => each - (start ?? NaN));
  if (first >= 0 && first < last && last <= all.length) {
    const decode = (from, to) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(all.subarray(from, to));
    return { before: decode(0, first), source: decode(first, last), after: decode(last) };
  }
  const at = own ? text.indexOf(own) : -1;
  if (at < 0) return { before: "", source: text, after: "" };
  return { before: text.slice(0, at), source: own, after: text.slice(at + own.length) };
}

/** The tokens [start, end) of a document around a source, with so many tokens before and after it. */
export function around([start, end], before, after, numTokens) {
  return [Math.max(0, start - before), Math.max(end, Math.min(numTokens, end + after))];
}
