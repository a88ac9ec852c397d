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
  const key = event.key.toLowerCase();
  let done = true;
  if (key === "escape") done = escape(event);
  else if (mod && !event.shiftKey && !event.altKey && key === "k") focusSearch();
  else if (mod && event.shiftKey && key === "o") newChat();
  else if (mod && event.shiftKey && key === "s") openSettings();
  else if (mod && event.shiftKey && key === "c") [...document.querySelectorAll("[aria-label='Copy the answer']")].at(-1)?.click();
  else if (!mod && key === "?" && !typing(event.target)) showKeys();
  else if (key === "arrowup" && event.target.id === "question" && !event.target.value) {
    const last = [...document.querySelectorAll("[data-key^='edit-']:not(:disabled)")].at(-1);
    last?.click();
    document.querySelector("textarea.edit")?.focus();
    done = Boolean(last);
  } else done = false;
  if (done) event.preventDefault();
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
