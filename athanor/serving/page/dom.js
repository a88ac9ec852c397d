// Small tools to build elements. Nothing here takes HTML: text is always text.

export const $ = (id) => document.getElementById(id);

/** An outline icon of index.html, hidden from screen readers. */
export function icon(name) {
  const svg = copyOf("icons");
  svg.replaceChildren(svg.querySelector(`[data-name=${name}]`));
  return svg;
}

/** A copy of what a template of index.html holds. */
export const copyOf = (id) => $(id).content.firstElementChild.cloneNode(true);

/** An element, as "tag.class". `onX` properties are listeners, `for`, `aria-…` and the like attributes, false ones are left out. */
export function h(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  element.classList.add(...classes);
  if (name === "button") element.type = "button";
  for (const [name, value] of Object.entries(properties)) {
    if ((value ?? false) === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => (child ?? false) !== false));
  return element;
}

/** "1 chat", "2 chats". */
export const counted = (count, noun) => `${count.toLocaleString()} ${noun}${count === 1 ? "" : "s"}`;

/** A button that is only an icon; `label` is its name for screen readers and its tooltip. */
export function iconButton(name, label, onclick, extra = {}) {
  return h("button.icon", { "aria-label": label, title: label, onclick, ...extra }, icon(name));
}

/** The name and the tooltip of a button that shows none. */
export function setLabel(element, text) {
  element.setAttribute("aria-label", text);
  element.title = text;
}

export function setIcon(element, name) {
  element.querySelector("svg")?.remove();
  element.prepend(icon(name));
}

/** What screen readers say next. */
export function announce(text) {
  $("live").textContent = text;
}

/** A short note at the head of the page, with an optional action. */
export function toast(text, action = null, seconds = 6) {
  const note = h("div.toast", {}, h("span", {}, text),
    action && h("button.text", { onclick: () => (note.remove(), action.run()) }, action.label));
  for (const other of [...$("toasts").children]) if (other.firstChild.textContent === text) other.remove();
  $("toasts").append(note);
  setTimeout(() => note.remove(), seconds * 1000);
}

/** Copy, also where the clipboard API is not allowed (plain http from another machine). */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = h("textarea.unseen", { value: text });
    (button.closest("dialog") ?? document.body).append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  setIcon(button, "check");
  announce("Copied");
  setTimeout(() => setIcon(button, "copy"), 1500);
}

/** A modal dialog with a heading, which removes itself when closed. Escape and a press outside close it. */
export function openDialog(label, classes, ...children) {
  const dialog = h("dialog", { class: classes, "aria-label": label },
    h("div.drawer-head", {}, h("h2", {}, label), iconButton("close", "Close", () => dialog.close())), ...children);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("mousedown", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** A menu under `button`. items: {label, icon, danger, checked, detail, run}. Arrow keys move, Escape closes. */
export function openMenu(button, label, items, classes = "") {
  const open = document.querySelector(".menu");
  open?.close();
  if (open?.opener === button) return; // a second press closes
  const menu = h("div", { class: `menu ${classes}`, role: "menu", "aria-label": label });
  menu.opener = button;
  const outside = (event) => !menu.contains(event.target) && !button.contains(event.target) && menu.close();
  menu.close = (focus = false) => {
    menu.remove();
    button.setAttribute("aria-expanded", "false");
    document.removeEventListener("pointerdown", outside, true);
    if (focus) button.focus();
  };
  for (const item of items) {
    const run = () => (menu.close(true), item.run());
    const kind = item.checked === undefined ? { role: "menuitem" } : { role: "menuitemradio", "aria-checked": String(item.checked) };
    menu.append(h("button", { tabindex: "-1", class: item.danger && "danger", onclick: run, ...kind },
      item.icon && icon(item.icon), item.detail ? h("span.grow", {}, item.label, item.detail) : item.label,
      item.checked && icon("check")));
  }
  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape" || event.key === "Tab") menu.close(true);
    else moveFocus(event, [...menu.children]);
    event.stopPropagation();
  });
  document.body.append(menu);
  place(menu, button);
  button.setAttribute("aria-expanded", "true");
  document.addEventListener("pointerdown", outside, true);
  (menu.querySelector("[aria-checked=true]") ?? menu.firstElementChild)?.focus();
}

/** A bar of which this share is filled. */
export function bar(share) {
  const element = h("span.bar", {}, h("i"));
  element.firstChild.style.width = `${share * 100}%`;
  return element;
}

/** Put `element` below `button`, or above where there is no room, inside the window. */
export function place(element, button) {
  const box = button.getBoundingClientRect();
  const left = Math.min(box.left, innerWidth - element.offsetWidth - 8);
  const below = box.bottom + element.offsetHeight + 12 < innerHeight;
  element.style.left = `${Math.max(8, left)}px`;
  element.style.top = `${below ? box.bottom + 4 : Math.max(8, box.top - element.offsetHeight - 4)}px`;
}

/** Enter in a field runs `action`, and Shift+Enter begins a new line. */
export function onEnter(field, action) {
  field.addEventListener("keydown", (event) => {
    // Enter also ends the input of a Chinese, Japanese or Korean word; 229 is how some browsers say so.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    action();
  });
}

/** Arrow keys, Home and End among `elements`, one after another in a ring. */
export function moveFocus(event, elements, from = document.activeElement) {
  const at = elements.indexOf(from);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: elements.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  elements[(to + elements.length) % elements.length]?.focus();
}
