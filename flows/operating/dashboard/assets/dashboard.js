// Draws each snapshot from /events. Text from the home's files is inserted as text, never as HTML.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 420, HEIGHT = 150, LEFT = 42, BOTTOM = 18;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function replace(id, children, whenEmpty) {
  const place = document.getElementById(id);
  place.replaceChildren(...(children.length ? children : [element("p", whenEmpty, "empty")]));
}

function ago(seconds, now) {
  if (seconds === null) return "";
  const passed = Math.max(0, now - seconds);
  if (passed < 120) return `${Math.round(passed)} s ago`;
  return passed < 7200 ? `${Math.round(passed / 60)} min ago` : `${Math.round(passed / 3600)} h ago`;
}

function rows(headings, lines) {
  const head = element("tr");
  for (const heading of headings) head.append(element("th", heading));
  return [head, ...lines.map(({ cells, fault }) => {
    const line = element("tr", undefined, fault ? "fault" : "");
    for (const cell of cells) line.append(element("td", cell));
    return line;
  })];
}

function stage({ part, done_ratio, progress }) {
  const bar = element("div", undefined, "bar"), filled = element("div");
  filled.style.width = `${100 * done_ratio}%`;
  bar.append(filled);
  const made = element("div");
  made.append(element("div", `${part}: ${Math.round(100 * done_ratio)} % ${progress}`), bar);
  return made;
}

function isRunningStage({ state, done_ratio }) {
  return state === "running" && done_ratio !== null;
}

// A value that is not a number (a diverged loss) arrives as null.
function rounded(value) {
  return value === null ? "no number" : Number(value.toPrecision(3)).toString();
}

function curve({ title, x_label, series }) {
  const all = Object.values(series);
  const xs = all.flatMap(([x]) => x), ys = all.flatMap(([, y]) => y).filter(Number.isFinite);
  const made = element("figure");
  made.append(element("figcaption", title));
  if (ys.length) made.append(lines(title, x_label, series, xs, ys));
  Object.entries(series).forEach(([name, [, y]], index) => {
    made.append(element("span", `${name} ${rounded(y[y.length - 1])} `, `legend${index % 2}`));
  });
  return made;
}

function lines(title, x_label, series, xs, ys) {
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)], [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  const across = (x) => LEFT + (WIDTH - LEFT - 6) * (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5);
  const up = (y) => (HEIGHT - BOTTOM) - (HEIGHT - BOTTOM - 8) * (y1 > y0 ? (y - y0) / (y1 - y0) : 0.5);
  const image = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const y of y1 > y0 ? [y0, y1] : [y0]) {
    image.append(drawn("line", { class: "grid", x1: LEFT, x2: WIDTH - 6, y1: up(y), y2: up(y) }));
    image.append(drawn("text", { x: LEFT - 4, y: up(y) + 3, "text-anchor": "end" }, rounded(y)));
  }
  image.append(drawn("text", { x: LEFT, y: HEIGHT - 4 }, `${x_label} ${rounded(x0)}`));
  image.append(drawn("text", { x: WIDTH - 6, y: HEIGHT - 4, "text-anchor": "end" }, rounded(x1)));
  Object.values(series).forEach(([x, y], index) => {
    const points = x.map((value, at) => [value, y[at]]).filter(([, value]) => Number.isFinite(value));
    if (!points.length) return;
    const path = points.map(([a, b]) => `${across(a).toFixed(1)},${up(b).toFixed(1)}`).join(" ");
    image.append(drawn("polyline", { class: `series${index % 2}`, points: path }));
    const [lastX, lastY] = points[points.length - 1];
    image.append(drawn("circle", { class: `series${index % 2}`, cx: across(lastX), cy: up(lastY), r: 2 }));
  });
  return image;
}

function chain(versions) {
  const most = Math.max(...versions.map((version) => version.stored_bytes), 1);
  const step = (WIDTH - LEFT) / versions.length;
  const label = `stored bytes of versions of ${versions[0].chain}`;
  const image = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  versions.forEach((version, index) => {
    const height = (HEIGHT - BOTTOM - 8) * version.stored_bytes / most;
    image.append(drawn("rect", {
      class: version.kind, x: LEFT + index * step, width: Math.max(1, step - 2),
      y: HEIGHT - BOTTOM - height, height,
    }));
  });
  const first = versions[0], last = versions[versions.length - 1];
  image.append(drawn("text", { x: LEFT - 4, y: 12, "text-anchor": "end" }, rounded(most / 2 ** 20)));
  image.append(drawn("text", { x: LEFT, y: HEIGHT - 4 }, `version ${first.version}`));
  image.append(drawn("text", { x: WIDTH - 6, y: HEIGHT - 4, "text-anchor": "end" }, `${last.version}`));
  const caption = element("p", `${last.chain}, MiB: `);
  caption.append(element("span", "anchor ", "legend0"), element("span", "delta", "legend1"));
  return [caption, image];
}

function arm({ checkpoint, share, interactions, sessions }) {
  return `${checkpoint || "nothing"}: ${Math.round(100 * share)} % of sessions, ` +
    `${interactions} interactions, ${sessions} settled sessions`;
}

function canary({ line, since, control, candidate, test }, now) {
  const looks = !test ? "not tested by this machine's `ostinato up`" :
    `${test.looks_done} of ${test.looks} looks done` +
    (test.next_look_sessions === null ? "" : `, next at ${test.next_look_sessions} sessions of each arm`) +
    (test.next_look_judged_sessions === 0 ? "" : `, ${test.next_look_judged_sessions} with an edit kept or reverted`);
  const from = test ? new Date(1000 * test.promoted_from).toLocaleString() : "";
  return { cells: [line, ago(since, now), arm(control), arm(candidate), looks, test ? test.last_verdict : "", from] };
}

function draw(snapshot) {
  const now = snapshot.at;
  const faults = snapshot.parts.filter((part) => part.fault).map((part) => `${part.fault} (${part.part})`);
  const state = document.getElementById("state");
  state.className = faults.length ? "lost" : "";
  state.textContent = `${new Date(1000 * now).toLocaleTimeString()}, findings: ${faults.join(", ") || "none"}`;
  replace("stages", snapshot.parts.filter(isRunningStage).map(stage), "no stage runs");
  replace("curves", snapshot.curves.map(curve), "nothing has been trained here");
  replace("versions", snapshot.chains.flatMap(chain), "no weights were published here");
  replace("parts", rows(["part", "state", "waits for", "since", "cause, progress"],
    snapshot.parts.slice().reverse().map((part) => ({
      cells: [part.part, part.state, part.waits_for, ago(part.since, now), part.cause || part.progress],
      fault: part.fault,
    }))), "");
  replace("cycles", snapshot.cycles.length ? rows(["cycle", "line", "opened", "outcome", "stages"],
    snapshot.cycles.map((cycle) => ({
      cells: [cycle.cycle_id, cycle.line, ago(cycle.opened_at, now), cycle.outcome || "open",
        Object.keys(cycle.stages).join(", ")],
    }))) : [], "no cycle yet");
  replace("canaries", snapshot.canaries.length ? rows(
    ["line", "since", "control", "candidate", "looks", "last look", "not promoted before"],
    snapshot.canaries.map((one) => canary(one, now))) : [], "no canary is open");
  replace("promotions", snapshot.promotions.length ? rows(["line", "action", "checkpoint", "when", "reason"],
    snapshot.promotions.map((row) => ({
      cells: [row.line, row.action, row.checkpoint_id, ago(row.at, now), row.reason],
    }))) : [], "nothing was promoted yet");
  replace("pages", snapshot.pages.map((page) => {
    const item = element("li"), link = element("a", page);
    link.href = "/reports/" + page.split("/").map(encodeURIComponent).join("/");
    item.append(link);
    return item;
  }), "no report yet");
}

const events = new EventSource("/events");
events.onmessage = (event) => draw(JSON.parse(event.data));
events.onerror = () => {
  const state = document.getElementById("state");
  state.className = "lost";
  state.textContent = "the dashboard does not answer; trying again";
};
