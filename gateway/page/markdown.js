// Markdown of answers as elements: paragraphs, headings, lists, quotes, code, emphasis and links. Text becomes text
// nodes, links lead to http(s) only, and images are never loaded. All parsing is linear in the length of the text.
import { html } from "./html.js";

const DEEPEST = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])([ \t]+)(?=\S)(.*)$/;
const LINK = /\[([^[\]\n]{1,500})\]\(([^\s()<>]{1,2000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,200})?)(?:[ \t]"[^"\n]{0,500}")?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"`*]{1,2000}/y;
const SPECIAL = /[\\`*_[]|https?:\/\//g;

export const Markdown = ({ text }) => blocks(text.split("\n"), 0);

function blocks(lines, depth) {
  if (depth > DEEPEST) return lines.join("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const [read, block] = blank(line) ? [1, null] : (code(lines, at) ?? quote(lines, at, depth) ?? list(lines, at, depth) ?? single(line) ?? paragraph(lines, at));
    if (block) found.push(block);
    at += read;
  }
  return found;
}

const blank = (line) => line.trim() === "";

/** Whether the line ends a paragraph. */
const begins = (line) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || /^(?:[-*+]|1[.)])$/.test(ITEM.exec(line)?.[2] ?? "");

/** Fenced code, up to its end or that of the text: the answer may still be written. */
function code(lines, at) {
  const fence = FENCE.exec(lines[at])?.[1];
  if (!fence) return null;
  const isEnd = (line) => line.trim().startsWith(fence) && line.trim() === fence[0].repeat(line.trim().length);
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  return [end + 1 - at, html`<pre tabindex="0" role="group" aria-label="Code"><code>${lines.slice(at + 1, end).join("\n")}</code></pre>`];
}

function quote(lines, at, depth) {
  const inner = [];
  for (let found; (found = QUOTE.exec(lines[at + inner.length] ?? "")); ) inner.push(found[1]);
  return inner.length ? [inner.length, html`<blockquote>${blocks(inner, depth + 1)}</blockquote>`] : null;
}

function list(lines, at, depth) {
  const first = RULE.test(lines[at]) ? null : ITEM.exec(lines[at]);
  if (!first) return null;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  for (let item = first; item; ) {
    const width = item[1].length + item[2].length + Math.min(item[3].length, 4);
    const inner = [item[4]];
    for (end += 1; end < lines.length; end += 1) {
      const line = lines[end];
      const indent = line.length - line.trimStart().length;
      const isInner = blank(line) || indent > item[1].length + 1 || !(begins(line) || ITEM.test(line) || blank(lines[end - 1]));
      if (!isInner) break;
      inner.push(line.slice(Math.min(indent, width)));
    }
    items.push(inner);
    const next = ITEM.exec(lines[end] ?? "");
    item = next && /\d/.test(next[2]) === isOrdered && !RULE.test(lines[end]) ? next : null;
  }
  const content = items.map((inner) => html`<li>${tight(inner, depth + 1)}</li>`);
  return [end - at, isOrdered ? html`<ol start=${Number.parseInt(first[2], 10)}>${content}</ol>` : html`<ul>${content}</ul>`];
}

/** An item; its first paragraph is text without a margin. */
function tight(lines, depth) {
  if (depth > DEEPEST || begins(lines[0])) return blocks(lines, depth);
  const [read, , text] = paragraph(lines, 0);
  return [...text, ...blocks(lines.slice(read), depth)];
}

/** A heading, below those of the page, or a rule. */
function single(line) {
  if (RULE.test(line)) return [1, html`<hr />`];
  const [, marks, text] = HEADING.exec(line) ?? [];
  return marks ? [1, html`<${`h${Math.min(6, marks.length + 2)}`}>${inline(text.trim(), 0)}<//>`] : null;
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !blank(lines[end]) && !begins(lines[end])) end += 1;
  const text = inline(lines.slice(at, end).join("\n"), 0);
  return [end - at, html`<p>${text}</p>`, text];
}

/** Text with code, emphasis and links, as an array. */
function inline(text, depth, isLink = false) {
  if (depth > DEEPEST) return [text];
  const found = [];
  const missing = new Set(); // delimiters without an end in the rest of the text: they are not searched for again
  let begin = 0;
  SPECIAL.lastIndex = 0;
  for (let special; (special = SPECIAL.exec(text)); ) {
    const at = special.index;
    const [end, element] = part(text, at, depth, isLink, missing);
    if (element !== null) {
      found.push(text.slice(begin, at), element);
      begin = end;
    }
    SPECIAL.lastIndex = end;
  }
  found.push(text.slice(begin));
  return found;
}

/** The end of the special characters at `at`, and their element; null if they are text. Nested calls change the
 * position of SPECIAL. */
function part(text, at, depth, isLink, missing) {
  const sign = text[at];
  if (sign === "\\") return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [at + 2, text[at + 1]] : [at + 1, null];
  if (sign === "`") return codeSpan(text, at, missing);
  if (sign === "*" || sign === "_") return emphasis(text, at, depth, isLink, missing);
  return isLink ? [at + 1, null] : link(text, at, depth);
}

function codeSpan(text, at, missing) {
  const length = run(text, at);
  const mark = "`".repeat(length);
  for (let end = missing.has(mark) ? -1 : text.indexOf(mark, at + length); end >= 0; ) {
    const other = run(text, end);
    if (other === length) return [end + length, html`<code>${text.slice(at + length, end).replace(/^ (?=.*\S)([^]*) $/, "$1")}</code>`];
    end = text.indexOf(mark, end + other);
  }
  missing.add(mark);
  return [at + length, null];
}

function emphasis(text, at, depth, isLink, missing) {
  const sign = text[at];
  const length = run(text, at);
  const inner = at + length;
  const isWord = (index) => /[\p{L}\p{N}_]/u.test(text[index] ?? "");
  const opens = length <= 3 && /\S/.test(text[inner] ?? "") && !(sign === "_" && isWord(at - 1));
  const mark = sign.repeat(length);
  if (!opens || missing.has(mark)) return [inner, null];
  for (let end = text.indexOf(mark, inner); end >= 0; ) {
    const other = run(text, end);
    if (other === length && /\S/.test(text[end - 1]) && !(sign === "_" && isWord(end + other))) {
      const content = inline(text.slice(inner, end), depth + 1, isLink);
      const strong = length > 1 ? html`<strong>${content}</strong>` : content;
      return [end + length, length === 2 ? strong : html`<em>${strong}</em>`];
    }
    end = text.indexOf(mark, end + other);
  }
  missing.add(mark);
  return [inner, null];
}

function link(text, at, depth) {
  LINK.lastIndex = ADDRESS.lastIndex = at;
  const [whole, label, address] = LINK.exec(text) ?? [];
  if (whole) {
    const url = webAddress(address);
    return url ? [at + whole.length, anchor(url, inline(label, depth + 1, true))] : [at + 1, null];
  }
  const bare = ADDRESS.exec(text)?.[0].replace(/[.,;:!?'\])}_]{1,20}$/, "");
  const url = bare && webAddress(bare);
  return url ? [at + bare.length, anchor(url, bare)] : [at + 1, null];
}

/** The normalized address; "" unless it is one of the web. */
function webAddress(address) {
  try {
    const { protocol, href } = new URL(address);
    return protocol === "https:" || protocol === "http:" ? href : "";
  } catch {
    return ""; // relative addresses would lead to this page
  }
}

const anchor = (url, content) => html`<a href=${url} title=${url} rel="noopener noreferrer nofollow" target="_blank">${content}</a>`;

/** The length of the run of one character. */
function run(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}
