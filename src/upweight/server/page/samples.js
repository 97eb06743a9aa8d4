// The stored samples of a job: a list that can be searched, each sample with its tokens.

import { get, rl } from "./api.js";
import { badge, h, number, words } from "./dom.js";
import { tokensView } from "./tokens.js";

const PAGE = 20;
const SHOWN = 48; // characters of a prompt's end
const FATES = ["trained", "zero_advantage", "masked", "stale", "refused", "not_yet_trained"];

export class SamplesView {
  constructor(id) {
    this.id = id;
    this.search = h("input", { type: "search", id: "search", placeholder: "text, task or id", maxlength: 200 });
    this.fate = h("select", { id: "fate" }, h("option", { value: "" }, "any"), ...FATES.map((fate) => h("option", { value: fate }, words(fate))));
    this.batch = h("input", { type: "number", id: "batch", min: 0, step: 1, placeholder: "any" });
    const form = h(
      "form.filter",
      { role: "search", onsubmit: (event) => (event.preventDefault(), this.#ask()), onchange: () => this.#ask() },
      h("label", { for: "search" }, "Search", this.search),
      h("label", { for: "fate" }, "Fate", this.fate),
      h("label", { for: "batch" }, "Batch", this.batch),
    );
    this.list = h("ol.samples");
    this.note = h("p.quiet", { role: "status" });
    this.more = h("button.more", { type: "button", hidden: true, onclick: () => this.#ask(this.next) }, "Older samples");
    this.element = h("div", {}, form, this.list, this.note, this.more);
  }

  /** Called often: the list is asked for anew when something came and nobody reads in it. */
  async look(accepted, version) {
    const stand = `${accepted} ${version}`;
    if (stand === this.stand || this.paged || this.list.querySelector("[open]")) return;
    this.stand = stand;
    await this.#ask();
  }

  async #ask(after = null) {
    this.paged = Boolean(after);
    const query = { limit: PAGE, after, search: this.search.value.trim(), fate: this.fate.value, batch: this.batch.value };
    const asked = (this.asked = JSON.stringify(query));
    let answer;
    try {
      answer = await get(rl(this.id, "samples"), query);
    } catch (error) {
      this.note.textContent = error.message;
      return;
    }
    if (asked !== this.asked) return; // a newer question was asked meanwhile
    const items = answer.data.map((one) => this.#item(one));
    if (after) this.list.append(...items);
    else this.list.replaceChildren(...items);
    this.next = answer.next;
    this.more.hidden = !answer.next;
    const narrowed = query.search || query.fate || query.batch;
    this.note.textContent = this.list.children.length ? "" : narrowed && answer.next ? `None among the newest ${answer.searched}.` : narrowed ? "No sample fits." : "No samples yet.";
  }

  #item(one) {
    const body = h("div.body");
    const details = h(
      "details.sample",
      { ontoggle: () => details.open && !body.children.length && this.#open(one, body) },
      h(
        "summary",
        {},
        h("span.facts", {}, h("b.reward", {}, `reward ${number(one.reward ?? one.normalized_reward)}`), badge(one.fate), h("span", {}, `batch ${one.batch_index}`), one.staleness != null && h("span", {}, one.staleness === -1 ? "on-policy" : `staleness ${number(one.staleness)}`), h("span", {}, `${one.trained_tokens} of ${one.tokens} tokens trained`), one.matched === false && h("span", {}, "unmatched")),
        h("span.preview", {}, one.prompt && h("span.context", {}, endOf(oneLine(one.prompt))), h("span.answer", {}, one.text == null ? `sample ${one.id}` : oneLine(one.text) || "(empty)")),
      ),
      body,
    );
    return h("li", {}, details);
  }

  async #open(one, body) {
    body.replaceChildren(h("p.quiet", {}, "…"));
    try {
      body.replaceChildren(...tokensView(await get(rl(this.id, `samples/${encodeURIComponent(one.id)}`))));
    } catch (error) {
      body.replaceChildren(h("p.problem", { role: "alert" }, error.message));
    }
  }
}

const oneLine = (text) => text.trim().replace(/\s*\n\s*/g, " ↵ ");
const endOf = (text) => (text.length > SHOWN ? "…" + text.slice(-SHOWN) : text);
