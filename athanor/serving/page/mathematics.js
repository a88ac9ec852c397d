// Formulas (LaTeX) of an untrusted model as MathML, which browsers draw themselves.
//
// marked only finds a formula and holds its place. temml makes MathML of it, without definitions of macros, addresses
// and HTML, and DOMPurify keeps the elements and attributes that are listed here: none loads or links anything, and
// none moves what it holds over other parts of the page. What temml refuses is shown as its source.

import DOMPurify from "./vendor/purify.es.mjs";
import { $, h } from "./dom.js";

// Pandoc's rule for single dollars, so that prices stay prices. A backtick ends the search: code is not touched. No
// formula holds its own opening sign, so a text of nothing but these signs is read once and not once for each of them.
const DOLLARS = /\$\$(?:\\[^`]|[^\\$`])+\$\$/.source;
const BRACKETS = /\\\[(?:\\[^[\]`]|[^\\`])+\\\]/.source;
const ROUND = /\\\((?:\\[^()`]|[^\\`])+\\\)/.source;
const SINGLE = /\$(?![\s$])(?:\\[^`]|[^\\$`])+(?<!\s)\$(?!\d)/.source;
const ANY = `${DOLLARS}|${BRACKETS}|${ROUND}|${SINGLE}`;
const INLINE = new RegExp(`^(?:${ANY})`);
const ALL = new RegExp(`\\\\[^([]|${ANY}`, "g");
const BLOCK = new RegExp(`^ {0,3}(${DOLLARS}|${BRACKETS})[ \\t]*(?:\\n+|$)`);

/** A line with which a formula of several lines begins, ended or not. */
export const BEGINS = /^[ \t]*(?:\$\$|\\\[)/m;

export const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const renderer = ({ text }) => `<code class="math">${escaped(text)}</code>`;
const found = (type, pattern, whole = 0) => (source) => {
  const match = pattern.exec(source);
  return match && !/\n[ \t]*\n/.test(match[whole]) ? { type, raw: match[0], text: match[whole] } : undefined;
};

/** For marked. */
export const mathematics = {
  extensions: [
    { name: "formulaBlock", level: "block", start: (source) => /\n {0,3}(?:\$\$|\\\[)/.exec(source)?.index,
      tokenizer: found("formulaBlock", BLOCK, 1), renderer: (token) => `<p>${renderer(token)}</p>\n` },
    { name: "formula", level: "inline", start: (source) => /\$|\\[([]/.exec(source)?.index,
      tokenizer: found("formula", INLINE), renderer },
  ],
  // Asterisks in a formula are no emphasis of the text around it.
  hooks: { emStrongMask: (source) => source.replace(ALL, (match) => INLINE.test(match) ? "a".repeat(match.length) : match) },
  tokenizer: {
    // A line of = in a formula makes no heading of what stands above it.
    lheading: (source) => /^(?:(?! {0,3}(?:=+|-+)[ \t]*\n).+\n)*? {0,3}(?:\$\$|\\\[)/.test(source) ? undefined : false,
  },
};

const OPTIONS = { throwOnError: true, trust: false, wrap: "tex", maxExpand: 1000, maxSize: [20, 200] };
const DEFINES = /\\(?:[egx]?def|let|futurelet|global|long|(?:re)?newcommand|providecommand|DeclareMathOperator)(?![a-z])/i;
const DOUBLES = /\\(?:cancelto|(?:math)?llap|equilibrium(?:Right|Left)|bordermatrix)|<=>>|<<=>/g;
const DEEPEST = "* > ".repeat(50) + "*";

/** What is read in an instant. temml makes each row as long as the longest, and what DOUBLES names twice and oftener. */
function modest(tex) {
  const cells = tex.split("&").length * tex.split(/\\\\|\\cr|\\newline/).length;
  return tex.length <= 4000 && cells <= 3000 && (tex.match(DOUBLES) ?? []).length <= 4 && !DEFINES.test(tex);
}

/** What no text of a model may have. */
export const STRICT = { ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };
const MATHML = {
  ALLOWED_TAGS: ["math", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "mfrac", "msqrt", "mroot", "mstyle", "mpadded",
    "mphantom", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts",
    "mtable", "mtr", "mtd"],
  ALLOWED_ATTR: ["display", "displaystyle", "scriptlevel", "mathvariant", "stretchy", "fence", "separator", "form", "symmetric",
    "largeop", "movablelimits", "minsize", "maxsize", "accent", "accentunder", "linethickness", "lspace", "rspace", "notation",
    "columnspan", "rowspan", "width", "height", "class"],
  ...STRICT,
};

DOMPurify.addHook("uponSanitizeAttribute", (node, data) => {
  if (!node.namespaceURI.endsWith("MathML")) return;
  // Only an empty space has a size; a part of a formula with one, or with less than none, would lie over others.
  const sized = data.attrName === "width" || data.attrName === "height";
  if ((sized && node.localName !== "mspace") || /-[\d.]/.test(data.attrValue)) data.keepAttr = false;
});

/** Lines of boxes and tables are styles in what temml makes, and browsers do not agree on menclose: prose.css draws both. */
const lines = (html) => html.replace(/(<\/?)menclose\b/g, "$1mrow").replace(/\bstyle="([^"]*)"/g, (_, style) => {
  const sides = [...style.matchAll(/border(?:-(top|right|bottom|left))?:/g)].map(([, side]) => side ?? "box");
  return sides.length ? `notation="${sides.join(" ")}"` : "";
});

/** The MathML of a source; null where it stays a source. */
function made(source, displayMode) {
  const tex = source.startsWith("$") && !displayMode ? source.slice(1, -1) : source.slice(2, -2);
  if (!modest(tex)) return null;
  try {
    const html = globalThis.temml.renderToString(tex, { ...OPTIONS, displayMode, macros: {} });
    const fragment = html.length < 200_000 && DOMPurify.sanitize(lines(html), MATHML);
    return fragment && !fragment.querySelector(DEEPEST) ? fragment : null; // nested deeper, it is long in being laid out
  } catch {
    return null;
  }
}

const known = new Map(); // a growing paragraph is drawn with each of its pieces

function draw(place) {
  const source = place.textContent;
  const displayMode = /^(?:\$\$|\\\[)/.test(source);
  if (known.size > 500) known.clear();
  if (!known.has(source)) known.set(source, made(source, displayMode));
  if (!known.get(source)) return;
  place.classList.add(displayMode ? "display" : "inline");
  place.replaceChildren(known.get(source).cloneNode(true));
}

let waiting = null; // formulas until temml is there

/** Shows the formula whose place `code` holds; as its source until temml, which the first formula asks for, is there. */
export function showFormula(code) {
  const place = h("span.formula", {}, code.textContent);
  code.replaceWith(place);
  if (globalThis.temml) return draw(place);
  if (waiting) return void waiting.push(place);
  waiting = [place];
  // temml is a script and no module, and the policy of trusted types lets no script of ours name another: a copy of
  // what index.html names is a script to run.
  const script = document.importNode($("formula-library").content, true).firstElementChild;
  script.addEventListener("load", () => {
    waiting.forEach(draw);
    waiting = null;
    document.dispatchEvent(new Event("formulas"));
  });
  script.addEventListener("error", () => (waiting = null, script.remove()));
  document.head.append(script);
}
