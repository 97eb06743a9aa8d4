// Which view is shown, and when it is asked to look again.

import { NoKey, get, setKey, takeKeyFromAddress } from "./api.js";
import { h, say } from "./dom.js";
import { JobView } from "./job.js";
import { JobsView } from "./jobs.js";

const EVERY = 2000; // ms between two looks
const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const connection = document.getElementById("connection");

let view = null;
let timer = 0;

function choose() {
  clearTimeout(timer);
  const [, kind, id] = location.hash.replace(/^#/, "").split("/");
  view = kind === "jobs" && id ? new JobView(decodeURIComponent(id)) : new JobsView();
  crumbs.replaceChildren(...(view.name ? [h("span", { "aria-hidden": "true" }, "/"), h("code", {}, view.name)] : []));
  document.title = view.name ? `${view.name} · upweight` : "upweight";
  main.replaceChildren(view.element);
  look(view);
}

async function look(shown) {
  try {
    if (!document.hidden) {
      await shown.look();
      told("live", "");
    }
  } catch (error) {
    if (shown !== view) return;
    if (error instanceof NoKey) return askForKey(error.message);
    told(error instanceof TypeError ? "server not reached, trying again" : error.message, "bad");
  }
  if (shown === view) timer = setTimeout(() => look(shown), EVERY);
}

function told(text, tone) {
  say(connection, text);
  connection.className = `connection ${tone}`;
}

function askForKey(problem) {
  const field = h("input", { id: "key", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  const form = h(
    "form.card.key",
    { onsubmit: enter },
    h("h1", {}, "API key"),
    h("p", {}, "The key lies in the file ", h("code", {}, "api_key"), " of the server's home folder, ", h("code", {}, "~/.upweight"), " unless another was given."),
    h("label", { for: "key" }, "Key"),
    field,
    h("p.problem", { role: "alert" }, problem),
    h("button", { type: "submit" }, "Open"),
  );
  async function enter(event) {
    event.preventDefault();
    setKey(field.value.trim());
    try {
      await get("v1/fine_tuning/jobs", { limit: 1 });
      choose();
    } catch (error) {
      askForKey(error.message);
    }
  }
  told("", "");
  crumbs.replaceChildren();
  main.replaceChildren(form);
  field.focus();
}

takeKeyFromAddress();
addEventListener("hashchange", () => {
  takeKeyFromAddress();
  choose();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden || !view) return;
  clearTimeout(timer);
  look(view);
});
choose();
