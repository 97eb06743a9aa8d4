// All jobs of the project, newest first.

import { get } from "./api.js";
import { ago, badge, h, modelName, progressBar } from "./dom.js";

const PAGE = 50;

export class JobsView {
  constructor() {
    this.name = "";
    this.rows = h("tbody");
    this.table = h(
      "table.jobs",
      {},
      h("thead", {}, h("tr", {}, ...["Job", "Model", "State", "Trained", "Created"].map((name) => h("th", { scope: "col" }, name)))),
      this.rows,
    );
    this.none = h(
      "div.card.none",
      { hidden: true },
      h("h2", {}, "No job yet"),
      h("p", {}, "Create one in another terminal:"),
      h("pre", {}, "upweight jobs create --model SmolLM2-135M-Instruct --batch-size 64"),
    );
    this.more = h("button.more", { type: "button", hidden: true, onclick: () => this.#older() }, "Older jobs");
    this.older = [];
    this.element = h("div", {}, h("h1", {}, "Jobs"), this.none, this.table, this.more);
  }

  async look() {
    const answer = await get("v1/fine_tuning/jobs", { limit: PAGE });
    const newest = answer.data;
    const known = new Set(newest.map((job) => job.id));
    this.older = this.older.filter((job) => !known.has(job.id));
    if (!this.older.length) this.hasMore = answer.has_more;
    this.#show([...newest, ...this.older]);
  }

  async #older() {
    const last = this.shown.at(-1);
    const answer = await get("v1/fine_tuning/jobs", { limit: PAGE, after: last.id });
    this.older.push(...answer.data);
    this.hasMore = answer.has_more;
    this.#show([...this.shown, ...answer.data]);
  }

  #show(jobs) {
    this.shown = jobs;
    this.none.hidden = jobs.length > 0;
    this.table.hidden = !jobs.length;
    this.more.hidden = !this.hasMore;
    const rows = jobs.map(row);
    const present = [...this.rows.children];
    if (present.length === rows.length && rows.every((one, i) => one.dataset.id === present[i].dataset.id)) {
      // The link stays the same element, so that it keeps the focus and a key that is being pressed.
      rows.forEach((one, i) => [...one.children].slice(1).forEach((cell, k) => present[i].children[k + 1].replaceWith(cell)));
      return;
    }
    const focused = document.activeElement?.getAttribute?.("href");
    this.rows.replaceChildren(...rows);
    if (focused) this.rows.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  }
}

function row(job) {
  const total = job.total_steps;
  const done = job.trained_steps ?? 0;
  return h(
    "tr",
    { "data-id": job.id },
    h("td", { "data-label": "Job" }, h("a", { href: `#/jobs/${job.id}` }, job.suffix ? `${job.suffix} ` : "", h("code", {}, job.id))),
    h("td", { "data-label": "Model" }, modelName(job.model)),
    h("td", { "data-label": "State" }, badge(job.job_status), h("span.reason", {}, job.error?.message ?? job.reason)),
    h("td.trained", { "data-label": "Trained" }, total ? progressBar(done, total, `${done} of ${total} batches`) : null, `${done} / ${total ?? "∞"}`),
    h("td", { "data-label": "Created" }, ago(job.created_at)),
  );
}
