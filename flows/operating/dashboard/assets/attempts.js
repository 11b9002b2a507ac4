// The table of attempts of one run. A click opens the attempt; its group shows all attempts side by side.
import { element, getJson, inAddress, link } from "./elements.js";

let table;

function numeric(title, field, digits) {
  return {
    title, field, hozAlign: "right", sorter: "number", headerFilter: "number", headerFilterFunc: ">=",
    headerFilterPlaceholder: "at least", formatter: (cell) => cell.getValue()?.toFixed(digits) ?? "",
  };
}

function text(title, field, widthGrow) {
  return { title, field, headerFilter: "input", widthGrow };
}

// The last part of an id, which opens the attempts of that id.
function linked(title, field) {
  const formatter = (cell) => link(cell.getValue().split(".").at(-1), `/attempts/${inAddress(cell.getValue())}`);
  return { ...text(title, field, 1.2), formatter };
}

export function startAttempts() {
  table = new Tabulator("#attempt-list", {
    index: "trajectory_id", layout: "fitColumns", height: "80vh", placeholder: "no attempt of this run is in the ledger",
    columns: [
      { ...numeric("step", "step", 0), widthGrow: 0.8 },
      text("problem", "problem_id", 3),
      linked("group", "group_id"), linked("attempt", "trajectory_id"),
      { title: "solved", field: "solved", formatter: "tickCross", formatterParams: { allowEmpty: true }, hozAlign: "center",
        headerFilter: "tickCross", headerFilterParams: { tristate: true } },
      numeric("reward", "reward", 3), numeric("turns", "turns", 0), numeric("calls", "calls", 0),
      numeric("tokens", "tokens", 0), numeric("seconds", "seconds", 1),
      text("outcome", "outcome", 1.2), text("state", "state", 1.2), numeric("version", "weight_version", 0),
    ],
  });
  return new Promise((built) => table.on("tableBuilt", built));
}

export async function showAttempts(run) {
  const title = document.getElementById("attempts-of");
  if (!run) {
    title.textContent = "Choose an RL run first.";
    await table.setData([]);
    return;
  }
  title.replaceChildren(element("strong", run), " newest first; ", link("its plots", `#runs?run=${encodeURIComponent(run)}`));
  await table.setData(await getJson(`/runs/${inAddress(run)}/attempts`));
}
