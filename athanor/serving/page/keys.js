// Keyboard shortcuts, and the list of them.

import { live, stop } from "./chat.js";
import { $, copyOf, openDialog } from "./dom.js";
import { open as openSettings } from "./settings.js";
import { drawer, focusSearch } from "./sidebar.js";

export function start() {
  $("show-keys").addEventListener("click", showKeys);
  document.addEventListener("keydown", onKey);
}

const typing = (target) => target.matches?.("input, textarea, select, [contenteditable]");

function onKey(event) {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  const mod = event.ctrlKey || event.metaKey;
  const name = [mod && "mod", mod && event.altKey && "alt", mod && event.shiftKey && "shift", event.key.toLowerCase()].filter(Boolean).join(" ");
  const last = (selector) => [...document.querySelectorAll(selector)].at(-1);
  const run = {
    escape: () => escape(event),
    "mod k": focusSearch,
    "mod shift o": newChat,
    "mod shift s": openSettings,
    "mod shift c": () => last("[aria-label='Copy the answer']")?.click(),
    "?": () => !typing(event.target) && showKeys(),
    arrowup: () => event.target.id === "question" && !event.target.value && edit(last("[data-key^='edit-']:not(:disabled)")),
  }[name];
  if (run && run() !== false) event.preventDefault();
}

function edit(button) {
  if (!button) return false;
  button.click();
  document.querySelector("textarea.edit").focus();
}

function escape(event) {
  if (drawer(false)) return true;
  if (event.target.id === "search") {
    event.target.value = "";
    event.target.dispatchEvent(new Event("input"));
    $("question").focus();
    return true;
  }
  if (!live()) return false;
  stop();
  return true;
}

function newChat() {
  drawer(false);
  location.hash = "#/";
  $("question").focus();
}

function showKeys() {
  const list = copyOf("keys");
  if (/Mac|iPhone|iPad/.test(navigator.platform)) for (const key of list.querySelectorAll("kbd")) key.textContent = key.textContent.replace("Ctrl", "⌘");
  openDialog("Keyboard shortcuts", "box keys", list);
}
