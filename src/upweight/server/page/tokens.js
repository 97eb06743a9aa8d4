// The tokens of one sample, coloured by what is known of each.

import { h, number, say } from "./dom.js";

const WAYS = { probability: "probability", mask: "trained or context", version: "version" };

/** Elements for a whole sample: choice of colours, the text, facts of the token that is pointed at, metadata. */
export function tokensView(sample) {
  const told = h("p.told", { "aria-live": "polite" }, "Point at a token, or step through them with the arrow keys.");
  const text = h("div.tokens", { tabindex: 0, role: "group", "aria-label": "Tokens of the sample" }, ...sample.pieces.map((piece, i) => token(sample, piece, i)));
  const tell = (element) => {
    if (!element) return;
    text.querySelector(".at")?.classList.remove("at");
    element.classList.add("at");
    say(told, facts(sample, [...text.children].indexOf(element)));
  };
  text.addEventListener("pointerover", (event) => tell(event.target.closest(".token")));
  text.addEventListener("click", (event) => tell(event.target.closest(".token")));
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = text.querySelector(".at");
    const next = at ? (step > 0 ? at.nextElementSibling : at.previousElementSibling) : text.firstElementChild;
    tell(next);
    next?.scrollIntoView({ block: "nearest" });
  });
  const paint = (way) => (text.dataset.way = way);
  const group = `way-${sample.id}`;
  const choice = h(
    "fieldset.ways",
    {},
    h("legend", {}, "Colour by"),
    ...Object.entries(WAYS).map(([way, name]) => h("label", {}, h("input", { type: "radio", name: group, value: way, checked: way === "probability", onchange: () => paint(way) }), name)),
  );
  paint("probability");
  return [choice, text, told, rest(sample)];
}

function token(sample, piece, i) {
  const trained = sample.mask[i] === 1;
  const element = h(`span.token.${trained ? "trained" : "context"}`, {}, piece.replaceAll("\n", "↵\n") || "·");
  if (trained) element.style.setProperty("--doubt", `${Math.round(100 * (1 - Math.exp(Math.min(0, sample.logprobs[i] ?? 0))))}%`);
  const version = sample.versions?.[i];
  if (version != null) element.style.setProperty("--hue", String((version * 137) % 360));
  else element.classList.add("unknown");
  return element;
}

function facts(sample, i) {
  const parts = [`token ${i}: “${sample.pieces[i].replaceAll("\n", "↵")}”`, `id ${sample.token_ids[i]}`];
  if (sample.mask[i] !== 1) return [...parts, "context, not trained"].join(" · ");
  const logprob = sample.logprobs[i];
  parts.push(`logprob ${number(logprob)}`, `probability ${number(Math.exp(logprob))}`);
  const raw = sample.raw_logprobs?.[i];
  if (raw != null && raw !== logprob) parts.push(`raw logprob ${number(raw)}`);
  const version = sample.versions?.[i];
  parts.push(version == null ? "version not known" : `version ${version}`);
  const temperature = sample.temperatures?.[i];
  if (temperature != null && temperature !== 1) parts.push(`temperature ${number(temperature)}`);
  return parts.join(" · ");
}

function rest(sample) {
  const facts = { id: sample.id, task: sample.task_id, "normalized reward": sample.normalized_reward, ...sample.metadata, ...sample.debug_info };
  const pairs = Object.entries(facts).filter(([, value]) => value != null);
  return h("dl.facts", {}, ...pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "string" ? value : JSON.stringify(value)))));
}
