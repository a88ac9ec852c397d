// For the Node.js that playwright runs in: what a Firefox does not know counts as done, for a release for companies
// (ESR) is up to a year older than the one playwright speaks to. It asks for a colour scheme, for one, before anything.
const parse = JSON.parse;
JSON.parse = (...given) => {
  const value = parse(...given);
  const unknown = value?.type === "error" && value.error === "unknown command";
  return unknown ? { type: "success", id: value.id, result: {} } : value;
};
