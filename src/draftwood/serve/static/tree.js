// One round's tree as SVG. Columns are depths; the accepted path runs straight along the top.

const CHAR = 7.85; // width of a character of 13px monospace
const ROW = 26;
const GAP = 24;
const MARK = 12; // from a mark's middle to its text
const PAD = 18;

const NS = "http://www.w3.org/2000/svg";

/** An SVG element with attributes. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A token so that one sees its spaces and line breaks. */
export function visible(text) {
  const seen = text
    .replace(/ {3,}/g, (spaces) => `·×${spaces.length}`)
    .replace(/ /g, "·").replace(/\n/g, "↵").replace(/\r/g, "␍").replace(/\t/g, "⇥");
  return seen || "∅";
}

function short(text) {
  const letters = [...visible(text)];
  return letters.length > 14 ? `${letters.slice(0, 13).join("")}…` : letters.join("");
}

/** Who proposed a node: "suffix" of "suffix:8.sole". */
export const drafter = (source) => (source || "").split(":")[0] || "unknown";

const KNOWN = { suffix: "suffix", recycling: "recycling", model: "model-draft" };

/** The class that gives a drafter its colour. */
export const kind = (name) => KNOWN[name] ?? "other";

/** A drafter's mark, a shape of its own, around a place. */
export function mark(name, x, y) {
  const at = { class: "mark", transform: `translate(${x} ${y})` };
  switch (name) {
    case "root": return svg("circle", { ...at, r: 3 });
    case "target": return svg("path", { ...at, d: star(7.5, 3.2) });
    case "suffix": return svg("circle", { ...at, r: 5 });
    case "recycling": return svg("path", { ...at, d: "M0-6.5 6.5 0 0 6.5-6.5 0Z" });
    case "model": return svg("rect", { ...at, x: -5, y: -5, width: 10, height: 10 });
    default: return svg("path", { ...at, d: "M0-6 6 5-6 5Z" });
  }
}

/** A round to show before there is one. */
export const EXAMPLE = {
  tokens: [" quick", " brown", " red", " fox", " dog", " fox", " jumps", " ran", " over"],
  parents: [-1, 0, 0, 1, 1, 2, 3, 3, 6],
  scores: [1, 0.8, 0.15, 0.7, 0.1, 0.12, 0.6, 0.1, 0.5],
  sources: ["", "suffix:", "recycling:", "suffix:", "recycling:", "recycling:", "suffix:", "recycling:", "suffix:"],
  path: [0, 1, 3, 6],
  new_text: " brown fox jumps across",
  new_tokens: 4,
};

function star(outer, inner) {
  const points = [...Array(10).keys()].map((i) => {
    const r = i % 2 ? inner : outer;
    const angle = (i * Math.PI) / 5;
    return `${(r * Math.sin(angle)).toFixed(2)} ${(-r * Math.cos(angle)).toFixed(2)}`;
  });
  return `M${points.join("L")}Z`;
}

/** The model's own token at the end of the accepted path: its text, "" if not shown yet, or null. */
export function ownToken(round) {
  const { path, tokens, new_text: text, new_tokens: count } = round;
  if (count < path.length) return null; // a stop rule ended the text before it
  const accepted = path.slice(1).map((node) => tokens[node]).join("");
  return text.startsWith(accepted) ? text.slice(accepted.length) : "";
}

/** Nodes with their places, the model's own token included. */
export function layout(round) {
  const { tokens, parents, scores, sources, path } = round;
  const right = new Set(path);
  const nodes = tokens.map((text, i) => ({
    id: i, text, label: short(text), parent: parents[i], score: scores[i], right: right.has(i),
    by: i === 0 ? "root" : drafter(sources[i]), children: [], depth: 0, row: 0,
  }));
  for (const node of nodes.slice(1)) {
    nodes[node.parent].children.push(node);
    node.depth = nodes[node.parent].depth + 1;
  }
  const own = ownToken(round);
  if (own !== null) {
    const last = nodes[path[path.length - 1]];
    const node = {
      id: nodes.length, text: own, label: own ? short(own) : "…", parent: last.id, score: 1,
      right: true, by: "target", children: [], depth: last.depth + 1, row: 0,
    };
    last.children.push(node);
    nodes.push(node);
  }
  place(nodes);
  return nodes;
}

function place(nodes) {
  let rows = 0;
  const visit = (node, row) => {
    node.row = row;
    node.children.sort((a, b) => b.right - a.right || b.score - a.score || a.id - b.id);
    node.children.forEach((child, i) => visit(child, i === 0 ? row : ++rows));
  };
  visit(nodes[0], 0);
  const widths = [];
  for (const node of nodes) {
    node.width = [...node.label].length * CHAR;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, MARK + node.width + GAP);
  }
  const lefts = widths.map((_, depth) => widths.slice(0, depth).reduce((a, b) => a + b, PAD));
  for (const node of nodes) {
    node.x = lefts[node.depth];
    node.y = PAD + node.row * ROW;
  }
}

function edge(from, to) {
  const x1 = from.x + MARK + from.width + 5;
  const x2 = to.x - 9;
  const middle = Math.max((x1 + x2) / 2, x2 - GAP);
  const d = from.row === to.row
    ? `M${x1} ${from.y}H${x2}`
    : `M${x1} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${x2} ${to.y}`;
  return svg("path", {
    d,
    class: to.right ? "edge right" : "edge",
    "stroke-width": to.right ? 3 : (0.75 + 3 * to.score).toFixed(2),
    "stroke-opacity": to.right ? 1 : (0.3 + 0.7 * to.score).toFixed(2),
  });
}

function drawn(node) {
  const title = node.by === "target" ? "the model's own token"
    : node.by === "root" ? "the last token so far"
      : `${node.by}, score ${node.score.toFixed(2)}, ${node.right ? "right" : "not taken"}`;
  const name = node.by === "root" || node.by === "target" ? node.by : kind(node.by);
  const text = svg("text", { x: node.x + MARK, y: node.y + 4.5 });
  text.textContent = node.label;
  const about = svg("title");
  about.textContent = `${JSON.stringify(node.text)}: ${title}`;
  return svg("g", {
    class: `${name}${node.right || node.by === "root" ? " right" : ""}`,
    opacity: node.right ? 1 : (0.6 + 0.4 * node.score).toFixed(2),
  }, about, mark(node.by, node.x, node.y), text);
}

/** Draws a round into an <svg>; not much smaller than it is by nature. */
export function drawTree(element, round) {
  const nodes = layout(round);
  const width = Math.ceil(Math.max(...nodes.map((n) => n.x + MARK + n.width)) + PAD);
  const height = Math.ceil(Math.max(...nodes.map((n) => n.y)) + PAD);
  const edges = nodes.slice(1).map((node) => edge(nodes[node.parent], node));
  edges.sort((a, b) => a.classList.contains("right") - b.classList.contains("right"));
  element.replaceChildren(...edges, ...nodes.map(drawn));
  const room = element.parentElement.clientWidth || width;
  const scale = Math.min(1, Math.max(room / width, 0.85));
  element.setAttribute("viewBox", `0 0 ${width} ${height}`);
  element.setAttribute("width", Math.floor(width * scale));
  element.setAttribute("height", Math.floor(height * scale));
}

/** The round in words. */
export function sentence(round) {
  const guesses = round.tokens.length - 1;
  const right = round.path.length - 1;
  const own = ownToken(round);
  const words = own ? `, and the model's own token ${JSON.stringify(own)}` : "";
  if (guesses === 0) return `No guess: plain decoding${words}.`;
  const count = `${guesses} ${guesses === 1 ? "guess" : "guesses"}`;
  if (right === 0) return `${count}, none right${words}.`;
  const text = round.path.slice(1).map((node) => round.tokens[node]).join("");
  return `${count}, ${right} right: ${JSON.stringify(text)}${words}.`;
}
