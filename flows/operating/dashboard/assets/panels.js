// Plots of the chosen runs: one panel per plot, with all runs in it. Drawn by uPlot.
import { element, rounded } from "./elements.js";

const COLOURS = ["#2a6fdb", "#d98a00", "#2e9e5b", "#c2416b", "#7b57c9", "#0097a7", "#8d6e63", "#7a8794"];
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
const HEIGHT = 190;
const OTHER = "Other";

let shown = [], drawnRuns = "";
const zooms = new Map(); // key of a curve -> range of steps that the user chose
const watcher = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    if (contentRect.width > 0) target.plot?.setSize({ width: contentRect.width, height: HEIGHT });
  }
});

// Replaces all panels. `pages`: the runs' answers of /runs; `options`: smoothing (0..1), logarithmic.
export function drawPanels(place, pages, options) {
  for (const plot of shown) plot.destroy();
  watcher.disconnect();
  shown = [];
  place.replaceChildren();
  const runs = pages.map(({ run }) => run).join();
  if (runs !== drawnRuns) zooms.clear();
  drawnRuns = runs;
  const sections = new Map();
  for (const page of pages) {
    for (const curve of page.curves) {
      const section = sections.get(curve.section || OTHER) ?? new Map();
      sections.set(curve.section || OTHER, section);
      section.set(curve.key, [...(section.get(curve.key) ?? []), { run: page.run, curve }]);
    }
  }
  const names = shortNames(pages.map(({ run }) => run));
  for (const [title, curves] of sections) {
    place.append(element("h2", title));
    for (const found of curves.values()) place.append(panel(found, names, options));
  }
}

// Run -> recipe and seed where these differ, else the whole name. Empty for one run.
function shortNames(runs) {
  if (runs.length < 2) return new Map();
  const names = runs.map((run) => run.split("/")[0]);
  const areDistinct = new Set(names).size === names.length;
  return new Map(runs.map((run, index) => [run, areDistinct ? names[index] : run]));
}

function panel(found, names, options) {
  const { key, title, expected, x_label, y_label } = found[0].curve;
  const figure = element("figure");
  const caption = [title, y_label].filter(Boolean).join(", ");
  figure.append(element("figcaption", caption));
  const holder = element("div");
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", caption);
  figure.append(holder, element("p", `When things go well: ${expected}`, "expected"));
  const lines = found.flatMap(({ run, curve }) => Object.keys(curve.series).map((name, index) => ({
    curve, name,
    label: names.size ? `${names.get(run)} ${name}` : name,
    colour: COLOURS[(names.size ? [...names.keys()].indexOf(run) : index) % COLOURS.length],
    dash: names.size ? DASHES[index % DASHES.length] : [],
  })));
  // drawn when the panel is on the page, since its width is known only then
  requestAnimationFrame(() => {
    if (!holder.isConnected) return;
    const zoom = zooms.get(key);
    holder.plot = draw(holder, lines, x_label, found[0].curve.starts_at_zero, options);
    if (zoom) holder.plot.setScale("x", zoom);
    holder.plot.hooks.setScale = [(plot, axis) => axis === "x" && keepZoom(key, plot)];
    shown.push(holder.plot);
    watcher.observe(holder);
  });
  return figure;
}

function draw(holder, lines, xLabel, startsAtZero, { smoothing, logarithmic }) {
  const tables = [], series = [{ label: xLabel, value: (plot, x) => rounded(x ?? plot.data[0].at(-1)) }], bands = [];
  for (const { curve, name, label, colour, dash } of lines) {
    const [x, y] = curve.series[name];
    const usable = (values) => values.map((value) => (logarithmic && !(value > 0) ? null : value));
    const table = [x];
    const interval = curve.intervals[name];
    if (interval && smoothing === 0) {
      const at = series.length;
      for (const edge of interval) {
        table.push(usable(edge));
        series.push({ label, class: "band", stroke: "transparent", points: { show: false } });
      }
      bands.push({ series: [at + 1, at], fill: `${colour}26` });
    }
    if (smoothing > 0) {
      table.push(usable(y));
      series.push({ label, class: "raw", stroke: `${colour}40`, width: 1, points: { show: false } });
    }
    table.push(usable(smoothing > 0 ? smooth(y, smoothing) : y));
    series.push({
      label, stroke: colour, width: 1.6, dash, spanGaps: true,
      value: (plot, value, at, index) => rounded(index === null ? last(plot.data[at]) : value),
    });
    tables.push(table);
  }
  const axis = { stroke: inkOfPage(), grid: { stroke: "#8883", width: 1 }, ticks: { show: false }, size: 30 };
  return new uPlot({
    width: holder.clientWidth || 360, height: HEIGHT, series, bands,
    scales: {
      x: { time: false },
      y: { distr: logarithmic ? 3 : 1, range: logarithmic ? undefined : (plot, low, high) => rangeOf(low, high, startsAtZero) },
    },
    axes: [axis, { ...axis, size: 56, values: (plot, splits) => splits.map((split) => (split === null ? "" : rounded(split))) }],
    cursor: { sync: { key: "step" }, y: false },
    legend: { live: true },
  }, uPlot.join(tables), holder);
}

function keepZoom(key, { data: [steps], scales: { x: { min, max } } }) {
  if (min <= steps[0] && max >= steps.at(-1)) zooms.delete(key);
  else zooms.set(key, { min, max });
}

// Exponential moving average that begins unbiased, as Adam's moments do.
function smooth(values, weight) {
  let mean = 0, share = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

function last(values) {
  return values.findLast((value) => value !== null && value !== undefined) ?? null;
}

function rangeOf(low, high, startsAtZero) {
  if (low === null || high === null) return [0, 1];
  const bottom = startsAtZero ? Math.min(0, low) : low, top = startsAtZero ? Math.max(0, high) : high;
  const margin = 0.06 * (top - bottom || Math.abs(top) || 1);
  return [startsAtZero && bottom === 0 ? 0 : bottom - margin, top + margin];
}

function inkOfPage() {
  return getComputedStyle(document.documentElement).getPropertyValue("--muted").trim();
}
