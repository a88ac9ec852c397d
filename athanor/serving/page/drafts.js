// Unsent text, by chat; kept for the tab, so that a reload loses none.

import { recall, remember } from "./state.js";

const PLACE = "sessionStorage";
const named = (id) => `draft-${id ?? "new"}`;
const texts = new Map(); // where storage is off

export function draft(id) {
  if (!texts.has(id)) texts.set(id, recall(named(id), PLACE) ?? "");
  return texts.get(id);
}

export function setDraft(id, text) {
  texts.set(id, text);
  remember(named(id), text, PLACE);
}
