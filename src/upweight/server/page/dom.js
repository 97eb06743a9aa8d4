// Elements and texts. Everything from the server becomes text, never markup.

/** h("div.card", {title: "…"}, child, "text", …): an element; children that are null or false are left out. */
export function h(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

/** Set the text only when it changes, so that readers are not told twice. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function number(value, digits = 3) {
  if (value == null) return "–";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1).replace("e-", "e−");
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value).replace("-", "−");
  return value.toPrecision(digits).replace("-", "−");
}

export function span(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

export const ago = (unix) => `${span(Math.max(0, Date.now() / 1000 - unix))} ago`;

export const words = (name) => name.replaceAll("_", " ");

export const modelName = (model) => (model.startsWith("/") ? model.slice(model.lastIndexOf("/") + 1) : model);

const TONES = {
  succeeded: "good", running: "live", training: "live", loading: "live", waiting_for_samples: "wait", paused: "wait",
  queued: "wait", failed: "bad", cancelled: "off", working: "live", waiting: "wait", stalled: "bad", over: "off",
  trained: "good", zero_advantage: "off", masked: "off", stale: "wait", refused: "bad", not_yet_trained: "wait",
};

export const badge = (state) => h(`span.badge.${TONES[state] ?? "off"}`, {}, words(state));

export function progressBar(done, total, label) {
  const bar = h("progress", { max: total || 1, value: total ? done : 0, "aria-label": label });
  return bar;
}
