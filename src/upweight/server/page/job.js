// One job, as answers to four questions.

import { get, job as jobPath, rl } from "./api.js";
import { Chart } from "./charts.js";
import { ago, badge, h, modelName, number, progressBar, say, words } from "./dom.js";
import { SamplesView } from "./samples.js";

const EVENTS = 12;
const VERSIONS = 8;
const NAMES = { rollouts: "Rollouts", batch: "Batch", engine: "Engine", trainer: "Trainer" };

export class JobView {
  constructor(id) {
    this.id = id;
    this.name = id;
    this.versions = [];
    this.since = -1;
    this.head = h("header.job");
    this.numbers = h("dl.numbers");
    this.charts = {
      reward: new Chart("Reward of the rollouts", { empty: "Rollouts that put their raw reward into debug_info[\"reward\"] are charted here." }),
      score: new Chart("Held-out score", { empty: "Give RolloutRunner an eval_dataset and eval_every to see it." }),
      loss: new Chart("Loss"),
      mismatch: new Chart("Mismatch", { note: "largest difference of log-probabilities between sampler and trainer, on tokens of the same version; rounding is about 1e−5 to 1e−4" }),
    };
    this.headline = h("p.headline", { "aria-live": "polite" });
    this.chain = h("ol.chain");
    this.events = h("ol.events");
    this.fingerprints = h("tbody");
    this.staleness = h("div.bars");
    this.ledger = h("p.quiet");
    this.samples = new SamplesView(id);
    const { reward, score, loss, mismatch } = this.charts;
    this.element = h(
      "article",
      {},
      this.head,
      question("learning", "Is it learning?", this.numbers, h("div.charts", {}, reward.element, score.element, loss.element)),
      question("waiting", "What is it waiting for?", this.headline, this.chain, h("details", {}, h("summary", {}, "Events"), this.events)),
      question(
        "same",
        "Are sampler and trainer the same model?",
        h(
          "div.charts",
          {},
          mismatch.element,
          h("section.card", {}, h("h3", {}, "Staleness of the samples"), h("p.quiet", {}, "batch − 1 − oldest version that sampled a trained token; −1 is on-policy"), this.staleness),
          h(
            "section.card",
            {},
            h("h3", {}, "Fingerprints"),
            h("table.fingerprints", {}, h("thead", {}, h("tr", {}, ...["Version", "Weights", ""].map((name) => h("th", { scope: "col" }, name)))), this.fingerprints),
          ),
        ),
      ),
      question("say", "What do the rollouts say?", this.ledger, this.samples.element),
    );
  }

  async look() {
    const [job, progress, waiting, events] = await Promise.all([
      get(jobPath(this.id)),
      get(rl(this.id, "progress"), { since: this.since }),
      get(rl(this.id, "waiting")),
      get(`${jobPath(this.id)}/events`, { limit: EVENTS }),
    ]);
    const fresh = progress.versions.filter((version) => version.version > this.since);
    this.versions.push(...fresh);
    this.since = this.versions.at(-1)?.version ?? -1;
    this.#showHead(job, progress);
    this.#showLearning(progress);
    this.#showWaiting(waiting, events.data);
    this.#showSame(fresh.length > 0 || !this.looked ? await get(rl(this.id, "staleness")) : null);
    say(this.ledger, ledgerText(progress.ledger));
    await this.samples.look(progress.ledger.accepted, progress.version);
    this.looked = true;
  }

  #showHead(job, progress) {
    const told = JSON.stringify([job, progress.version, progress.filled_batches, progress.in_batch]);
    if (told === this.headTold) return;
    this.headTold = told;
    const total = progress.total_batches;
    const given = job.training_method?.[job.training_method?.type] ?? {};
    const method = given.hyperparameters ?? given; // of a job that trains on a file
    const hasFile = method !== given;
    const filled = hasFile ? progress.version ?? 0 : progress.filled_batches + progress.in_batch / progress.batch_size;
    const parts = [
      h("h1", {}, job.suffix || modelName(job.model), " ", badge(job.job_status)),
      h("p.quiet", {}, [job.training_method?.type, method.algorithm, method.lora ? `LoRA rank ${method.lora.rank ?? method.lora_r}` : "all parameters", modelName(job.model), `created ${ago(job.created_at)}`].filter(Boolean).join(" · ")),
      job.error && h("p.problem", { role: "alert" }, job.error.message),
      total && h("p.batches", {}, progressBar(filled, total, hasFile ? "Batches trained" : "Batches filled"), `${Math.floor(filled)} of ${total} batches ${hasFile ? "trained" : "filled"}`),
    ];
    this.head.replaceChildren(...parts.filter(Boolean));
  }

  #showLearning(progress) {
    const line = (metric) => this.versions.filter((one) => one.metrics[metric] != null).map((one) => [one.version, one.metrics[metric]]);
    this.charts.reward.show([{ label: "mean", points: line("reward_mean") }]);
    this.charts.loss.show([{ label: "loss", points: line("loss") }]);
    this.charts.mismatch.show([{ label: "largest", points: line("mismatch_max") }]);
    const scores = new Map();
    for (const { batch_index, metrics } of progress.client_metrics) {
      for (const [name, value] of Object.entries(metrics)) {
        if (!scores.has(name)) scores.set(name, []);
        scores.get(name).push([batch_index, value]);
      }
    }
    this.charts.score.show([...scores].map(([label, points]) => ({ label, points })));
    const newest = this.versions.at(-1)?.metrics ?? {};
    const shown = ["token_accuracy", "margin", "reward_accuracy", "grad_norm", "entropy", "approx_kl", "response_length_mean", "zero_variance_groups", "learning_rate"].filter((name) => newest[name] != null);
    fill(this.numbers, [
      ["version", progress.version ?? "–"],
      ["served", progress.inference_version ?? "–"],
      ...shown.map((name) => [words(name), number(newest[name])]),
    ]);
  }

  #showWaiting(waiting, events) {
    say(this.headline, waiting.headline);
    this.headline.className = `headline ${waiting.state}`;
    const told = JSON.stringify(waiting.parts);
    if (told !== this.chainTold) {
      this.chainTold = told;
      this.chain.replaceChildren(...waiting.parts.map((one) => h(`li.${one.state}`, {}, h("b", {}, NAMES[one.part]), h("span", {}, one.text))));
    }
    const ids = events.map((event) => event.id).join();
    if (ids === this.eventIds) return;
    this.eventIds = ids;
    this.events.replaceChildren(...events.map((event) => h(`li.${event.level}`, {}, h("time", {}, new Date(event.created_at * 1000).toLocaleTimeString()), event.message)));
  }

  #showSame(staleness) {
    if (!staleness) return;
    const newest = this.versions.slice(-VERSIONS).reverse();
    this.fingerprints.replaceChildren(
      ...newest.map((one) => h("tr", {}, h("td", {}, String(one.version)), h("td", {}, h("code", { title: one.fingerprint }, one.fingerprint.slice(0, 12))), h("td", {}, [one.update_skipped && "update skipped", one.checkpoint && "saved"].filter(Boolean).join(", ")))),
    );
    const counts = Object.entries(staleness.counts).map(([age, count]) => [Number(age), count]).sort((a, b) => a[0] - b[0]);
    const bars = counts.map(([age, count]) => [age === -1 ? "−1 on-policy" : number(age), count]);
    if (staleness.unknown) bars.push(["unknown", staleness.unknown]);
    const most = Math.max(1, ...bars.map(([, count]) => count));
    this.staleness.replaceChildren(
      ...(bars.length ? bars.map(([label, count]) => h("div.bar", {}, h("span", {}, label), h("meter", { min: 0, max: most, value: count, "aria-label": `staleness ${label}` }), h("span", {}, String(count)))) : [h("p.quiet", {}, "No samples yet.")]),
    );
  }
}

function question(id, title, ...children) {
  return h("section.question", { "aria-labelledby": `q-${id}` }, h("h2", { id: `q-${id}` }, title), ...children);
}

function fill(list, pairs) {
  const told = JSON.stringify(pairs);
  if (list.dataset.told === told) return;
  list.dataset.told = told;
  list.replaceChildren(...pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
}

function ledgerText(ledger) {
  const { accepted, unmatched, filtered, truncated, ...fates } = ledger;
  const parts = Object.entries(fates).filter(([, count]) => count).map(([name, count]) => `${count} ${words(name)}`);
  const apart = Object.entries({ unmatched, filtered, truncated }).filter(([, count]) => count).map(([name, count]) => `${count} ${name}`);
  return [`${accepted} accepted${parts.length ? ` = ${parts.join(" + ")}` : ""}`, ...apart].join("; ");
}
