// Markdown of an untrusted model as elements.
//
// Three walls: HTML in the text is shown as text (marked never passes it on), DOMPurify keeps only a short list of
// tags, attributes and addresses, and the page's Content-Security-Policy runs no script that is not a file of ours.

import { marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";
import hljs from "./vendor/highlight.min.js";
import { copyText, h, iconButton } from "./dom.js";
import { BEGINS, escaped, mathematics, showFormula, STRICT } from "./mathematics.js";

const ADDRESS = /^(?:https?:\/\/|mailto:)/i;

marked.use(mathematics, {
  gfm: true,
  breaks: true,
  tokenizer: {
    // Only asterisks are strong: iterator.__next__() is a name, and these models speak of Python.
    emStrong(source) {
      const [run] = /^__+/.exec(source) ?? [];
      return run ? { type: "text", raw: run, text: run, escaped: false } : false;
    },
  },
  renderer: {
    html: ({ text, block }) => block ? `<p>${escaped(text.trim()).replaceAll("\n", "<br>")}</p>` : escaped(text),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    // Images would be requests to other hosts: a link says where it is.
    image: ({ href, text }) => ADDRESS.test(href) ? `<a href="${escaped(href)}">${escaped(text || href)}</a>` : escaped(text),
  },
});

const PROSE = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote",
    "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "title", "align", "start", "class"],
  ALLOWED_URI_REGEXP: ADDRESS,
  ADD_URI_SAFE_ATTR: ["align", "start"], // else the pattern of addresses is held against them
  ...STRICT,
};
const COLOURED = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ...STRICT };

DOMPurify.addHook("uponSanitizeAttribute", (node, data) => {
  // A class could dress text up as a part of the page.
  if (data.attrName === "class" && !/^(math|tml-left|tml-right|language-[\w+#.-]+|hljs-[\w -]+_?)$/.test(data.attrValue)) data.keepAttr = false;
});
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A" || !node.hasAttribute("href")) return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

/** A text as the tokens of its Markdown: what it says, and nothing to show. */
export const parsed = (text) => marked.lexer(text);

/** Safe elements of one Markdown text. */
export function render(text) {
  try {
    return finish(DOMPurify.sanitize(marked.parser(blocks(text)), PROSE));
  } catch {
    return plain(text);
  }
}

/** As written: nested a thousand times, Markdown is more than its parser can take, and a chat must open all the same. */
const plain = (text) => h("pre.as-written", {}, text);

const DEEP = /^(?:[ \t]*(?:>|[-*+][ \t]|\d{1,9}[.)][ \t])){60}/m;
const DEFINITION = /^(?:async def|def|class) .*:[ \t]*(?:\n|$)/;

/**
 * Markdown's blocks, and code without a fence as code: small models learn from functions and not from Markdown, which
 * would take the indentation away. Code is a paragraph that begins with a definition, or has an indented line; what is
 * indented after it belongs to it.
 */
function blocks(text) {
  if (DEEP.test(text)) throw new RangeError("nested too deep"); // elements nested so deep lose what is in them
  const tokens = marked.lexer(text);
  const found = [];
  for (const token of tokens) {
    const before = found.findLast((one) => one.type !== "space");
    const indented = token.type === "code" && token.codeBlockStyle === "indented";
    if (indented && before?.unfenced) {
      before.raw = found.splice(found.indexOf(before) + 1).reduce((raw, one) => raw + one.raw, before.raw) + token.raw;
      before.text = before.raw.trimEnd();
    } else if (token.type === "paragraph" && !BEGINS.test(token.raw) && (DEFINITION.test(token.raw) || /\n[ \t]+\S/.test(token.raw))) {
      const lang = DEFINITION.test(token.raw) ? "python" : "";
      found.push({ type: "code", raw: token.raw, text: token.raw.trimEnd(), lang, unfenced: true });
    } else {
      found.push(token);
    }
  }
  return Object.assign(found, { links: tokens.links });
}

/** A text with fences around the code that has none, for what else reads Markdown. */
export function fenced(text) {
  if (text.includes("```") || DEEP.test(text)) return text;
  return blocks(text).map((one) => (one.unfenced ? `\`\`\`\n${one.text}\n\`\`\`\n\n` : one.raw)).join("").trim();
}

function finish(fragment) {
  fragment.querySelectorAll("code.math").forEach(showFormula);
  for (const code of fragment.querySelectorAll("pre > code")) code.parentNode.replaceWith(codeBlock(code));
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div.wide", { tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

function codeBlock(code) {
  const text = code.textContent.replace(/\n$/, "");
  const language = /^language-(.+)$/.exec(code.className)?.[1] ?? "";
  const coloured = hljs.getLanguage(language) && text.length < 50_000;
  const body = coloured ? DOMPurify.sanitize(hljs.highlight(text, { language, ignoreIllegals: true }).value, COLOURED) : text;
  return h("div.code", {},
    h("div.code-head", {}, h("span", {}, language || "text"),
      iconButton("copy", "Copy code", (event) => copyText(text, event.currentTarget))),
    h("pre", { tabindex: "0", "aria-label": `Code${language ? `, ${language}` : ""}` }, h("code", {}, body)));
}

/**
 * Shows a growing text in `element`, a block at a time: finished blocks are left alone, so that nothing flickers,
 * no selection is lost and the work per piece does not grow with the answer.
 */
export class Growing {
  constructor(element) {
    this.element = element;
    this.blocks = []; // {raw, element}
    this.text = "";
    this.asked = 0;
  }

  /** The whole text so far; drawn with the next frame. */
  show(text, drawn = () => {}) {
    this.text = text;
    if (this.asked) return;
    // Hidden tabs get no frames, and their text must be there when they are shown.
    const soon = document.hidden ? (run) => setTimeout(run, 100) : requestAnimationFrame;
    this.asked = soon(() => {
      this.asked = 0;
      this.draw();
      drawn();
    });
  }

  draw() {
    try {
      this.drawBlocks();
    } catch {
      this.blocks = [];
      this.element.replaceChildren(plain(this.text));
    }
  }

  drawBlocks() {
    const tokens = blocks(this.text);
    if (!this.blocks.length) this.element.replaceChildren();
    const { links } = tokens;
    // An address that is told at the end is that of links in blocks before it.
    const known = JSON.stringify(links);
    if (known !== this.known) for (const block of this.blocks) block.raw = null;
    this.known = known;
    const shown = tokens.filter((token) => token.type !== "space" && token.type !== "def");
    shown.forEach((token, at) => {
      if (this.blocks[at]?.raw === token.raw) return;
      const html = marked.parser(Object.assign([token], { links }));
      const element = h("div.block", {}, finish(DOMPurify.sanitize(html, PROSE)));
      if (this.blocks[at]) this.blocks[at].element.replaceWith(element);
      else this.element.append(element);
      this.blocks[at] = { raw: token.raw, element };
    });
    for (const block of this.blocks.splice(shown.length)) block.element.remove();
  }
}
