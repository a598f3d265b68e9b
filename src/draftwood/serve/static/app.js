// The page: a chat, and beside it the rounds of the answer.

import { Trouble, modelName, streamChat } from "./api.js";
import { acceptance, drawHistory, drawLine, drawTime, timeInWords } from "./charts.js";
import { drawLegend, drawTable } from "./details.js";
import { EXAMPLE, drawTree, sentence } from "./tree.js";

const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const WINDOW = 12; // rounds that the figures are taken over

const state = {
  model: "",
  messages: [], // of the conversation, as the API takes them
  rounds: [], // of the latest answer
  chosen: -1, // a round the reader looks at; -1 follows the newest
  running: null, // AbortController of the answer on its way
  rates: { own: null, plain: null, measured: false },
  run: null, // the answer on its way, or the latest
  last: null, // the latest finished answer: what was asked, and its text
  cached: null,
};

// --- the rounds -------------------------------------------------------------------------------

let drawnAt = 0;
let waiting = 0;

/** Draws soon: a few times a second are enough for an eye, fewer where motion is unwelcome. */
function draw(now = false) {
  const pause = calm.matches ? 1000 : 120;
  if (now || performance.now() - drawnAt >= pause) {
    clearTimeout(waiting);
    waiting = 0;
    drawnAt = performance.now();
    drawRounds();
  } else if (!waiting) {
    waiting = setTimeout(() => draw(true), pause);
  }
}

function drawRounds() {
  const { rounds } = state;
  const newest = rounds.length - 1;
  const at = state.chosen < 0 ? newest : Math.min(state.chosen, newest);
  $("which").textContent = newest < 0 ? "none yet" : `${at + 1} of ${rounds.length}`;
  $("before").disabled = at <= 0;
  $("after").disabled = at < 0 || at >= newest;
  $("live").setAttribute("aria-pressed", String(state.chosen < 0));
  $("scrub").disabled = newest < 1;
  $("scrub").max = Math.max(newest, 0);
  $("scrub").value = Math.max(at, 0);
  $("scrub").setAttribute("aria-valuetext", $("which").textContent);
  drawHistory($("history"), rounds, at);
  drawFigures();
  $("tree").classList.toggle("example", at < 0);
  if (at < 0) return drawExample();
  const round = rounds[at];
  $("sentence").textContent = sentence(round);
  drawTree($("tree"), round);
  drawLegend($("legend"), round);
  drawTime($("time"), round);
  $("time-note").textContent = timeInWords(round);
  $("time").setAttribute("aria-label", `Where the round's time went: ${timeInWords(round)}`);
  if ($("table-box").open) drawTable($("table"), round);
  for (const piece of document.querySelectorAll(".answer:last-of-type .piece")) {
    piece.classList.toggle("here", state.chosen >= 0 && Number(piece.dataset.from) <= at && at < Number(piece.dataset.to));
  }
}

/** Nothing was asked yet: what a round looks like. */
function drawExample() {
  $("sentence").textContent = `An example. ${sentence(EXAMPLE)}`;
  drawTree($("tree"), EXAMPLE);
  drawLegend($("legend"), EXAMPLE);
  $("time-note").textContent = "";
  for (const id of ["time", "table"]) $(id).replaceChildren();
}

function drawFigures() {
  const last = state.rounds.slice(-WINDOW);
  const sum = (count) => last.reduce((total, round) => total + count(round), 0);
  const guesses = sum((r) => r.tokens.length - 1);
  const right = sum((r) => r.path.length - 1);
  $("accepted").textContent = guesses ? `${Math.round((100 * right) / guesses)} %` : "–";
  $("per-round").textContent = last.length ? (sum((r) => r.new_tokens) / last.length).toFixed(1) : "–";
  $("nodes").textContent = last.length ? (guesses / last.length).toFixed(1) : "–";
  $("nodes-note").textContent = last.length ? `now ${last.at(-1).tokens.length - 1}` : "guesses a round";
  $("cached").textContent = state.cached?.tokens ?? "–";
  $("cached-note").textContent = state.cached?.of ? `of ${state.cached.of} tokens` : "prompt tokens";
  drawLine($("accepted-line"), acceptance(state.rounds, WINDOW));
  drawSpeed();
}

function drawSpeed() {
  const { own, plain, measured } = state.rates;
  const most = Math.max(own ?? 0, plain ?? 0, 1);
  $("rate").textContent = own === null ? "–" : own.toFixed(own < 10 ? 1 : 0);
  $("ratio").textContent = own && plain && own !== plain ? `${(own / plain).toFixed(1)}×` : "";
  $("bar-own").style.width = `${(100 * (own ?? 0)) / most}%`;
  $("bar-plain").style.width = `${(100 * (plain ?? 0)) / most}%`;
  $("rate-note").textContent = plain === null ? "plain: not known yet"
    : `plain: ${plain.toFixed(plain < 10 ? 1 : 0)} tokens/s (${measured ? "measured" : "estimate"})`;
}

function choose(index) {
  state.chosen = Math.min(index, state.rounds.length - 1);
  draw(true);
  const here = document.querySelector(".here");
  const log = $("log");
  if (!here) return;
  const [text, box] = [here.getBoundingClientRect(), log.getBoundingClientRect()];
  if (text.top < box.top || text.bottom > box.bottom) {
    log.scrollTop += text.top - box.top - box.height / 3;
  }
}

function step(by) {
  const at = state.chosen < 0 ? state.rounds.length - 1 : state.chosen;
  choose(Math.max(at + by, 0));
}

// --- the chat ---------------------------------------------------------------------------------

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function scrollDown() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

function notice(message) {
  $("notice").textContent = message;
  $("notice").hidden = !message;
}

function parameters() {
  const number = (id) => ($(id).value === "" ? null : Number($(id).value));
  // A seed is always sent: asking again then gives the same words.
  const seed = number("seed") ?? Math.floor(Math.random() * 2 ** 31);
  const asked = { temperature: number("temperature"), seed, max_tokens: number("max-tokens") };
  const nodes = number("max-nodes");
  return nodes === null ? asked : { ...asked, max_tree_nodes: nodes };
}

function wrongField() {
  for (const id of ["temperature", "seed", "max-tokens", "max-nodes"]) {
    const field = $(id);
    if (!field.checkValidity()) return field;
  }
  return null;
}

function begin(messages, question) {
  $("hello").hidden = true;
  notice("");
  for (const button of document.querySelectorAll(".again")) button.remove();
  if (question !== null) $("log").append(element("div", "said", question));
  const answer = element("div", "answer");
  answer.append(element("div", "text"), element("div", "foot"));
  $("log").append(answer);
  $("log").setAttribute("aria-busy", "true");
  $("log").scrollTop = $("log").scrollHeight;
  Object.assign(state, { rounds: [], chosen: -1, cached: null, running: new AbortController() });
  $("send").disabled = true;
  $("stop").disabled = false;
  draw(true);
  return answer;
}

function end(answer) {
  state.running = null;
  $("log").setAttribute("aria-busy", "false");
  $("send").disabled = false;
  $("stop").disabled = true;
  if (!answer.querySelector(".text").textContent) answer.remove();
  draw(true);
}

/** Adds a chunk to an answer: its text, its rounds, and the sums that the last one carries. */
function take(answer, run, chunk) {
  const rounds = chunk.draftwood?.rounds ?? [];
  const from = state.rounds.length;
  state.rounds.push(...rounds);
  if (rounds.length) state.cached = { tokens: rounds.at(-1).cached_tokens };
  const choice = chunk.choices?.[0];
  if (choice?.delta?.content) {
    const piece = element("span", "piece", choice.delta.content);
    Object.assign(piece.dataset, { from, to: state.rounds.length });
    const text = answer.querySelector(".text");
    text.append(piece);
    run.text += choice.delta.content;
    text.classList.toggle("code", run.text.includes("```"));
    scrollDown();
  }
  if (choice?.finish_reason) run.finish = choice.finish_reason;
  count(run, rounds);
  if (chunk.metrics) takeSums(run, chunk);
  if (rounds.length || chunk.metrics) draw();
}

/** Tokens a second since the first ones came, by this machine's clock. */
function count(run, rounds) {
  const tokens = rounds.reduce((total, round) => total + round.new_tokens, 0);
  if (!tokens) return;
  if (run.firstAt === null) {
    run.firstAt = performance.now();
    return;
  }
  run.tokens += tokens;
  const seconds = (performance.now() - run.firstAt) / 1000;
  if (run.tokens >= 5 && seconds > 0.2) setRate(run, run.tokens / seconds);
}

function setRate(run, rate) {
  state.rates.own = rate;
  if (!run.asked.speculation) Object.assign(state.rates, { plain: rate, measured: true });
}

function takeSums(run, chunk) {
  const { metrics, usage } = chunk;
  run.usage = usage;
  if (metrics.tokens_per_s) setRate(run, metrics.tokens_per_s);
  run.rate = metrics.tokens_per_s ?? state.rates.own;
  if (!state.rates.measured && metrics.plain_tokens_per_s) state.rates.plain = metrics.plain_tokens_per_s;
  state.cached = { tokens: metrics.num_cached_tokens ?? 0, of: usage?.prompt_tokens };
}

async function answerTo(messages, asked, question) {
  const answer = begin(messages, question);
  const run = { asked, messages, text: "", tokens: 0, firstAt: null, finish: null, rate: null, usage: null };
  state.run = run;
  const body = {
    model: state.model, messages, stream: true, stream_options: { include_usage: true },
    rounds: true, ...asked,
  };
  try {
    if (!state.model) await greet();
    body.model = state.model;
    await streamChat(body, {
      key: $("key").value, signal: state.running.signal, onChunk: (chunk) => take(answer, run, chunk),
    });
    finished(answer, run);
  } catch (error) {
    if (state.run === run) failed(error, run, question);
  }
  if (state.run !== run) return; // a new chat has begun
  if (run.text) state.messages = [...messages, { role: "assistant", content: run.text }];
  end(answer);
}

function finished(answer, run) {
  const { asked } = run;
  const how = asked.speculation ? "with speculation" : "plain";
  const tokens = run.usage ? `${run.usage.completion_tokens} tokens` : "";
  const rate = run.rate ? `${run.rate.toFixed(1)} tokens/s` : "";
  const cut = run.finish === "length" ? "cut at the most tokens" : "";
  const words = [how, tokens, rate, `seed ${asked.seed}`, cut].filter(Boolean).join(" · ");
  const foot = answer.querySelector(".foot");
  foot.append(element("span", "", words));
  const same = comparison(run);
  if (same) foot.append(element("span", "same", same));
  const button = element("button", "quiet again", `Ask again ${asked.speculation ? "without" : "with"} speculation`);
  button.type = "button";
  button.addEventListener("click", () => {
    $("speculation").checked = !asked.speculation;
    answerTo(run.messages, { ...asked, speculation: !asked.speculation }, null);
  });
  foot.append(button);
  state.last = run;
  scrollDown();
}

/** What the answer before shows, if it was the same question asked the other way. */
function comparison(run) {
  const { last } = state;
  const key = ({ messages, asked }) => JSON.stringify([messages, { ...asked, speculation: null }]);
  if (!last || last.asked.speculation === run.asked.speculation || key(last) !== key(run)) return "";
  if (last.text !== run.text) return "The words differ.";
  const [spec, plain] = run.asked.speculation ? [run, last] : [last, run];
  return spec.rate && plain.rate
    ? `The same words, ${(spec.rate / plain.rate).toFixed(1)}× as fast with speculation.`
    : "The same words.";
}

function failed(error, run, question) {
  if (error.name === "AbortError") {
    notice(run.text ? "Stopped. What had come is kept." : "Stopped.");
  } else {
    notice(error instanceof Trouble ? error.message : `Something in this page failed: ${error.message}`);
    if (!(error instanceof Trouble)) console.error(error);
  }
  if (error.status === 401) {
    $("settings").open = true;
    $("key").focus();
  }
  if (!run.text && question !== null) {
    [...document.querySelectorAll("#log .said")].at(-1)?.remove();
    if (!$("question").value) $("question").value = question;
  }
}

function submit(event) {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || state.running) return;
  const wrong = wrongField();
  if (wrong) {
    $("settings").open = true;
    wrong.reportValidity();
    return;
  }
  $("question").value = "";
  const messages = [...state.messages, { role: "user", content: question }];
  answerTo(messages, { ...parameters(), speculation: $("speculation").checked }, question);
}

function newChat() {
  state.running?.abort();
  Object.assign(state, {
    messages: [], rounds: [], chosen: -1, running: null, run: null, last: null, cached: null,
  });
  $("send").disabled = false;
  $("stop").disabled = true;
  for (const old of document.querySelectorAll(".said, .answer")) old.remove();
  $("hello").hidden = false;
  notice("");
  draw(true);
  $("question").focus();
}

async function greet() {
  state.model = await modelName($("key").value);
  $("model").textContent = state.model;
  document.title = `${state.model} · Draftwood`;
}

// --- wiring -----------------------------------------------------------------------------------

$("form").addEventListener("submit", submit);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.running?.abort();
});
$("stop").addEventListener("click", () => state.running?.abort());
$("new").addEventListener("click", newChat);
for (const button of document.querySelectorAll(".idea")) {
  button.addEventListener("click", (event) => {
    $("question").value = button.textContent.trim();
    submit(event);
  });
}
$("before").addEventListener("click", () => step(-1));
$("after").addEventListener("click", () => step(1));
$("live").addEventListener("click", () => choose(state.chosen < 0 ? state.rounds.length - 1 : -1));
$("scrub").addEventListener("input", () => choose(Number($("scrub").value)));
$("table-box").addEventListener("toggle", () => draw(true));
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  greet().then(() => notice(""), (error) => notice(error.message));
});
addEventListener("resize", () => draw());
draw(true);
greet().catch((error) => {
  $("model").textContent = "unknown";
  notice(error.message);
});
