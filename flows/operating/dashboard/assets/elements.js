// Small parts of the page. Text from the home's files is inserted as text, never as HTML.

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function link(text, href) {
  const made = element("a", text);
  made.href = href;
  return made;
}

export function replace(id, children, whenEmpty) {
  const place = document.getElementById(id);
  place.replaceChildren(...(children.length ? children : [element("p", whenEmpty, "empty")]));
}

export function rows(headings, lines) {
  const head = element("tr");
  for (const heading of headings) head.append(element("th", heading));
  return [head, ...lines.map(({ cells, fault }) => {
    const line = element("tr", undefined, fault ? "fault" : "");
    for (const cell of cells) line.append(element("td", cell));
    return line;
  })];
}

export function lasting(seconds) {
  if (seconds === null) return "";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export function ago(instant, now) {
  return instant === null ? "" : `${lasting(Math.max(0, now - instant))} ago`;
}

// A value that is not a number (a diverged loss) arrives as null.
export function rounded(value) {
  return value === null || value === undefined ? "no number" : Number(value.toPrecision(3)).toString();
}

// A path as part of an address: its slashes stay.
export function inAddress(path) {
  return path.split("/").map(encodeURIComponent).join("/");
}

export async function getJson(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}
