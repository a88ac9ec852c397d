// Small tools to build elements. Nothing here takes HTML: text is always text.

const SVG = "http://www.w3.org/2000/svg";

// Outlines on a 24 × 24 grid.
const ICONS = {
  plus: "M12 5v14M5 12h14",
  search: "M10.500 17a6.500 6.500 0 1 0 0-13 6.500 6.500 0 0 0 0 13zM20 20l-4.800-4.800",
  sidebar: "M4 5h16v14H4zM9.500 5v14",
  pen: "M4 20h4L19.500 8.500l-4-4L4 16zM13 7l4 4",
  keyboard: "M3 6h18v12H3zM7 10h.01M11 10h.01M15 10h.01M17.500 10h.01M8 14h8",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  down: "M12 5v14M6 13l6 6 6-6",
  up: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.500l4.500 4.500L19 7.500",
  redo: "M19.500 12a7.500 7.500 0 1 1-2.300-5.400M19.500 4v4h-4",
  good: "M7 11v9H4v-9zM7 11l4-8c1.800 0 2.500 1.200 2.200 2.800L12.600 9H18c1.500 0 2.300 1.200 2 2.600l-1.500 6.500c-.3 1.200-1.200 1.900-2.400 1.900H7",
  bad: "M17 13V4h3v9zM17 13l-4 8c-1.800 0-2.500-1.200-2.200-2.800l.6-3.200H6c-1.500 0-2.300-1.200-2-2.600L5.500 5.900C5.800 4.700 6.700 4 7.900 4H17",
  left: "M14.500 6l-6 6 6 6",
  right: "M9.500 6l6 6-6 6",
  more: "M5.500 12h.01M12 12h.01M18.500 12h.01",
  close: "M6 6l12 12M18 6L6 18",
  chevron: "M7 10l5 5 5-5",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  sun: "M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM12 3v1.500M12 19.500V21M3 12h1.500M19.500 12H21M5.600 5.600l1.100 1.100M17.300 17.300l1.100 1.100M5.600 18.400l1.100-1.100M17.300 6.700l1.100-1.100",
  moon: "M19.500 14.500A8 8 0 0 1 9.500 4.500a8 8 0 1 0 10 10z",
  auto: "M12 20a8 8 0 1 0 0-16 8 8 0 0 0 0 16zM12 4v16M12 8l5.500-1.200M12 12h8M12 16l5.500 1.200",
  book: "M5 4.500h9.500a4 4 0 0 1 4 4V20H9a4 4 0 0 1-4-4zM9 9h5.500M9 13h5.500",
  chart: "M5 20v-6M12 20V4M19 20V10",
  info: "M12 20.500a8.500 8.500 0 1 0 0-17 8.500 8.500 0 0 0 0 17zM12 11v5.500M12 7.700h.01",
  warning: "M12 4l9 16H3zM12 10v4.500M12 17.300h.01",
};

export const $ = (id) => document.getElementById(id);

/** An outline icon, hidden from screen readers. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** An element. `onX` properties are listeners, `class`, `for`, `aria-…` and the like attributes, false ones are left out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A button that is only an icon; `label` is its name for screen readers and its tooltip. */
export function iconButton(name, label, onclick, extra = {}) {
  return h("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...extra }, icon(name));
}

export function setIcon(element, name) {
  element.querySelector("svg")?.remove();
  element.prepend(icon(name));
}

/** What screen readers say next. */
export function announce(text) {
  $("live").textContent = text;
}

/** A short note at the foot of the page, with an optional action; returns the function that removes it. */
export function toast(text, action = null, seconds = 6) {
  const remove = () => note.remove();
  const note = h("div", { class: "toast" }, h("span", {}, text));
  for (const other of [...$("toasts").children]) if (other.firstChild.textContent === text) other.remove();
  if (action) {
    note.append(h("button", { type: "button", class: "text", onclick: () => (remove(), action.run()) }, action.label));
  }
  $("toasts").append(note);
  setTimeout(remove, seconds * 1000);
  return remove;
}

/** Copy, also where the clipboard API is not allowed (plain http from another machine). */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = h("textarea", { class: "unseen", value: text });
    (button.closest("dialog") ?? document.body).append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  const before = button.getAttribute("aria-label");
  setIcon(button, "check");
  announce("Copied");
  setTimeout(() => (setIcon(button, "copy"), button.setAttribute("aria-label", before)), 1500);
}

/** A modal dialog that removes itself when closed. Escape and a press outside close it. */
export function openDialog(label, classes, ...children) {
  const dialog = h("dialog", { class: classes, "aria-label": label }, ...children);
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
    menu.append(h("button", { type: "button", tabindex: "-1", class: item.danger && "danger", onclick: run, ...kind },
      item.icon && icon(item.icon), item.detail ? h("span", { class: "grow" }, item.label, item.detail) : item.label,
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

/** Put `element` below `button`, or above where there is no room, inside the window. */
export function place(element, button) {
  const box = button.getBoundingClientRect();
  const left = Math.min(box.left, innerWidth - element.offsetWidth - 8);
  const below = box.bottom + element.offsetHeight + 12 < innerHeight;
  element.style.left = `${Math.max(8, left)}px`;
  element.style.top = `${below ? box.bottom + 4 : Math.max(8, box.top - element.offsetHeight - 4)}px`;
}

/** Arrow keys, Home and End among `elements`. */
export function moveFocus(event, elements) {
  const at = elements.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: elements.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  elements[(to + elements.length) % elements.length]?.focus();
}
