// What stands beside the tree: who proposed what, and the same tree as a table.

import { drafter, kind, mark, svg, visible } from "./tree.js";

function make(name, ...children) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}

/** The marks of a round's tree and what they mean. */
export function drawLegend(list, round) {
  const names = [...new Set(round.sources.slice(1).map(drafter))].sort();
  const entries = [["root", "root", "last token so far"],
    ...names.map((name) => [name, kind(name), name]), ["target", "target", "the model's own"]];
  const items = entries.map(([name, color, words]) => {
    const size = { width: 16, height: 16, class: color, "aria-hidden": "true" };
    return make("li", svg("svg", size, mark(name, 8, 8)), make("span", words));
  });
  list.replaceChildren(...items, make("li", "filled and bold: right \u00b7 thickness: score"));
}

/** A row for each node. */
export function drawTable(body, round) {
  const right = new Set(round.path);
  body.replaceChildren(...round.tokens.map((token, i) => {
    const about = i === 0 ? ["", "", ""]
      : [round.sources[i] || "?", round.scores[i].toFixed(3), right.has(i) ? "yes" : ""];
    const cells = [i, i ? round.parents[i] : "", make("code", visible(token)), ...about];
    return make("tr", ...cells.map((cell) => make("td", cell)));
  }));
}
