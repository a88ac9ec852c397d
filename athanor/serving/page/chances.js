// An answer as its tokens, each tinted by how likely it was to the model, with what else was likely.

import { bar, h, moveFocus, place } from "./dom.js";

const percent = (share) => share >= 0.9995 ? "100 %" : share < 0.0005 ? "< 0.1 %" : `${(share * 100).toFixed(1)} %`;
const visible = (text) => text.replaceAll("\n", "↵").replaceAll(" ", "·") || "(end)";

/** likely: [text, probability or null, [[text, probability], …]] of each token. */
export function tinted(likely) {
  const spans = likely.map(([text, share, top]) => {
    if (share === null) return h("span", {}, text);
    const span = h("span.token", { tabindex: "-1" }, text.replaceAll("\n", "↵\n"));
    span.style.setProperty("--doubt", `${Math.round((1 - share) * 55)}%`);
    span.told = () => [h("strong", {}, `${visible(text)}  ${percent(share)}`),
      h("ul.facts", {}, top.map(([other, chance]) => h("li", {}, h("span.grow", {}, visible(other)), bar(chance), h("span.figure", {}, percent(chance)))))];
    return span;
  });
  const hide = () => box.querySelector(".chances")?.remove();
  const show = ({ target }) => {
    hide();
    if (!target.told) return;
    const tip = h("div.chances", { role: "status" }, target.told());
    box.append(tip);
    place(tip, target);
  };
  const onkeydown = (event) => {
    const key = { ArrowRight: "ArrowDown", ArrowLeft: "ArrowUp" }[event.key];
    if (key) moveFocus({ key, preventDefault: () => event.preventDefault() }, spans.filter((span) => span.told));
  };
  const box = h("div.prose.tokens", { tabindex: "0", role: "group", "aria-label": "Tokens by their probability; arrow keys go through them",
    onpointerover: show, onfocusin: show, onpointerleave: hide, onfocusout: hide, onwheel: hide, onkeydown }, spans);
  return box;
}
