// Lines over versions, drawn by uPlot in the page's colours.

import { h, number, say } from "./dom.js";

const HEIGHT = 150;
const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4"];
const dark = matchMedia("(prefers-color-scheme: dark)");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A card with a title, the newest value and a plot. `empty` stands where there is nothing to plot yet. */
export class Chart {
  constructor(title, { note = "", empty = "No numbers yet." } = {}) {
    this.title = title;
    this.value = h("span.value");
    this.plot = h("div.plot", { role: "img" });
    this.legend = h("div.legend");
    this.empty = h("p.quiet", {}, empty);
    this.element = h("section.card.chart", {}, h("h3", {}, title, this.value), note && h("p.quiet", {}, note), this.legend, this.plot, this.empty);
    this.series = [];
    new ResizeObserver(() => this.#resize()).observe(this.plot);
    dark.addEventListener("change", () => this.#draw());
  }

  /** series: [{label, points: [[x, y], …]}] */
  show(series) {
    const full = series.filter((one) => one.points.length);
    const told = JSON.stringify(full);
    if (told === this.told) return;
    this.told = told;
    this.series = full;
    const last = full.map((one) => one.points.at(-1)[1]);
    say(this.value, full.length === 1 ? number(last[0]) : "");
    this.plot.hidden = !full.length;
    this.empty.hidden = full.length > 0;
    this.legend.replaceChildren(
      ...(full.length > 1 ? full.map((one, i) => h(`span.swatch.k${(i % 4) + 1}`, {}, `${one.label} ${number(last[i])}`)) : []),
    );
    this.plot.setAttribute("aria-label", full.map((one) => this.#inWords(one)).join("; "));
    this.#draw();
  }

  #inWords({ label, points }) {
    const [first, last] = [points[0], points.at(-1)];
    return `${this.title}, ${label}: ${number(first[1])} at version ${first[0]}, ${number(last[1])} at version ${last[0]}`;
  }

  #resize() {
    if (this.drawn && this.plot.clientWidth) this.drawn.setSize({ width: this.plot.clientWidth, height: HEIGHT });
    else this.#draw();
  }

  #draw() {
    this.drawn?.destroy();
    this.drawn = null;
    if (!this.series.length || !this.plot.clientWidth) return;
    const xs = [...new Set(this.series.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
    const columns = this.series.map((one) => {
      const at = new Map(one.points);
      return xs.map((x) => at.get(x) ?? null);
    });
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    this.drawn = new uPlot(
      {
        width: this.plot.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, points: { size: 7 } },
        scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
        axes: [
          { ...axis, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000], grid: { show: false } },
          { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => number(tick)) },
        ],
        series: [
          {},
          ...this.series.map((one, i) => ({
            label: one.label,
            stroke: colour(COLOURS[i % COLOURS.length]),
            width: 2,
            spanGaps: true,
            points: { show: xs.length < 40, size: 5, fill: colour(COLOURS[i % COLOURS.length]) },
          })),
        ],
        hooks: { setCursor: [(plot) => this.#pointed(plot)] },
      },
      [xs, ...columns],
      this.plot,
    );
  }

  #pointed(plot) {
    const at = plot.cursor.idx;
    if (at == null || this.series.length !== 1) return say(this.value, this.series.length === 1 ? number(this.series[0].points.at(-1)[1]) : "");
    say(this.value, `${number(plot.data[1][at])} at ${plot.data[0][at]}`);
  }
}
