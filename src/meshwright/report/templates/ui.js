// A moved control is priced at once; other axes make up for it. The search follows when the controls rest.
// The address is the state.
const form = document.getElementById("controls");
const byId = (id) => document.getElementById(id);
const field = (name) => form.elements[name];
const REST_MS = 500, GREY_MS = 200, POLL_MS = 700, ONE_MOVE_MS = 700;
let tab = new URLSearchParams(location.search).get("tab") || DEFAULTS.tab;
if (!(tab in SEARCHED)) tab = DEFAULTS.tab;
const words = () => new Map(field("layout").value.split(",").map((w) => w.trim().split("=")).filter((w) => w.length === 2));
const state = () => Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, name === "tab" ? tab : field(name).value.trim()]));
const query = () => new URLSearchParams(Object.entries(state()).filter(([name, value]) => value !== DEFAULTS[name] || name === "model" || name === "hardware")).toString();
const UNITS = { "": 1, k: 1e3, m: 1e6, g: 1e9, ki: 2 ** 10, mi: 2 ** 20, gi: 2 ** 30 };
const tokens = (text) => { const m = /^([\d.]+)\s*([kmg]i?)?$/i.exec(text.trim()); return m ? m[1] * UNITS[(m[2] || "").toLowerCase()] : NaN; };
const binary = (power) => power >= 20 ? `${2 ** (power - 20)}Mi` : `${2 ** (power - 10)}Ki`;

function showLayout() {
  const at = words();
  for (const control of form.querySelectorAll("[data-axis]")) {
    const value = at.get(control.dataset.axis);
    if (control.type === "checkbox") control.checked = value === "true";
    else {
      const wanted = value ?? control.options[0].value;
      if (![...control.options].some((o) => o.value === wanted)) control.add(new Option(wanted));
      control.value = wanted;
    }
  }
  const power = Math.log2(tokens(field("batch").value));
  const range = document.getElementById("batch-range");
  if (Number.isFinite(power)) range.value = Math.round(power);
  range.setAttribute("aria-valuetext", field("batch").value);
}

function setWord(control) {
  const at = words(), axis = control.dataset.axis;
  const value = control.type === "checkbox" ? (control.checked ? "true" : "") : control.value;
  if (value === "" || (control.tagName === "SELECT" && value === control.options[0].value && axis !== "remat")) at.delete(axis);
  else at.set(axis, value);
  field("layout").value = [...at].map((pair) => pair.join("=")).join(",") || "data=1";
}

function showTab() {
  for (const part of document.querySelectorAll("[data-tabs]")) part.hidden = !part.dataset.tabs.split(" ").includes(tab);
  for (const button of byId("tabs").children) button.setAttribute("aria-selected", button.dataset.tab === tab);
  byId("ranked").textContent = { train: "Ranked layouts", serve: "Ways to serve", fit: "What fits" }[tab];
}

function suggest(found) {
  const buttons = (found.suggestions || []).map(({ control, value }) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${control}: ${value}`;
    button.dataset.control = control;
    button.dataset.value = value;
    return button;
  });
  byId("suggestions").replaceChildren(...buttons);
}

let asked = 0, underWay = null, greyTimer = 0;
async function price(axis = "") {
  if (tab !== "train") { byId("said").textContent = ""; byId("suggestions").replaceChildren(); return; }
  const mine = ++asked, answer = byId("answer");
  clearTimeout(greyTimer);
  underWay?.abort();
  underWay = new AbortController();
  try {
    const found = await (await fetch(`price?${query()}&moved=${axis}`, { signal: underWay.signal })).json();
    if (mine !== asked) return;
    if (found.remats || !answer.querySelector(".card")) {
      answer.innerHTML = found.html;
      makeReachable(answer);
    }
    answer.classList.toggle("old", !found.remats);
    byId("said").textContent = found.said;
    suggest(found);
    document.body.dataset.priceSeconds = found.seconds;
    if (found.layout !== field("layout").value.trim()) {
      field("layout").value = found.layout;
      showLayout();
      history.replaceState(null, "", `?${query()}`);
    }
    const offered = form.querySelector("[data-axis=remat]").options;
    if (found.remats) for (const one of offered) one.disabled = !found.remats.includes(one.value);
    greyTimer = setTimeout(() => grey(mine).catch(() => {}), GREY_MS);
  } catch (error) {
    if (error.name !== "AbortError") byId("said").textContent = "The server does not answer; is mw ui still running?";
  }
}

async function grey(mine) {
  const reached = await (await fetch(`reach?${query()}`, { signal: underWay.signal })).json();
  if (mine !== asked) return;
  for (const [axis, values] of Object.entries(reached)) {
    const control = form.querySelector(`[data-axis="${axis}"]`);
    if (control.type === "checkbox") control.disabled = !control.checked && !values.includes("true");
    else for (const one of control.options) one.disabled = !values.includes(one.value) && !one.selected;
  }
}

let searched = "", timer = 0;
async function rank(key) {
  if (key !== searched) return;
  const found = await (await fetch(`search?${key}`)).json();
  if (key !== searched) return;
  byId("search-said").textContent = found.said;
  const shown = byId(tab === "train" ? "ranking" : tab);
  if (found.html || found.done && !found.suggestions) shown.innerHTML = found.html;
  shown.classList.toggle("old", !found.html);  // the shown ranking is an earlier search's
  makeReachable(shown);
  if (found.done && found.suggestions && tab !== "train") suggest(found);
  if (!found.done) setTimeout(rank, POLL_MS, key);
}
function search() {
  const all = state();
  const key = new URLSearchParams([["tab", tab], ...SEARCHED[tab].map((name) => [name, all[name]])]).toString();
  if (key === searched) return;
  searched = key;
  byId("search-said").textContent = "searching";
  rank(key).catch(() => {});
}

const past = [];
let last = "", lastControl = null, lastTime = 0;
function remember(control) {
  const now = performance.now();
  if (last && !(control && control === lastControl && now - lastTime < ONE_MOVE_MS)) past.push(last);
  lastControl = control;
  lastTime = now;
  byId("undo").disabled = !past.length;
}
function moved(axis = "", control = null) {
  remember(control);
  last = query();
  history.replaceState(null, "", `?${last}`);
  price(axis).then(() => { last = query(); });
  clearTimeout(timer);
  timer = setTimeout(search, REST_MS);
}
function apply(text) {
  const given = new URLSearchParams(text);
  for (const name of Object.keys(DEFAULTS)) {
    const value = given.get(name) ?? DEFAULTS[name];
    if (name === "tab") tab = value; else field(name).value = value;
  }
  showTab();
  showLayout();
}
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", (event) => {
  if (event.target.id === "batch-range") field("batch").value = binary(event.target.valueAsNumber);
  if (event.target.dataset.axis) setWord(event.target);
  else showLayout();
  const name = event.target.dataset.axis || event.target.name || "batch";
  moved(name.startsWith("layout") ? "" : name, event.target);  // a layout is left as it is while it is typed
});
byId("tabs").addEventListener("click", (event) => {
  if (!event.target.dataset.tab) return;
  tab = event.target.dataset.tab;
  showTab();
  moved();
});
byId("undo").addEventListener("click", () => {
  const before = past.pop();
  byId("undo").disabled = !past.length;
  if (before === undefined) return;
  apply(before);
  last = before;
  history.replaceState(null, "", `?${before}`);
  price();
  search();
});
byId("copy-link").addEventListener("click", async (event) => {
  try {
    await navigator.clipboard.writeText(location.href);
    event.target.textContent = "Copied";
  } catch {
    event.target.textContent = "Copy it from the address bar";
  }
  setTimeout(() => { event.target.textContent = "Copy link"; }, 1500);
});
byId("suggestions").addEventListener("click", (event) => {
  const { control, value } = event.target.dataset;
  if (!control) return;
  field(control).value = value;
  showLayout();
  moved();
});
function pick(mark) {
  const layout = mark?.closest("[data-layout]")?.dataset.layout;
  if (!layout) return;
  field("layout").value = layout;
  showLayout();
  moved();
  byId("said").scrollIntoView({ block: "nearest" });
}
byId("ranking").addEventListener("click", (event) => pick(event.target.closest("[data-layout]") ?? markNear(event)));
byId("ranking").addEventListener("keydown", (event) => { if (event.key === "Enter" && isMark(event.target)) pick(event.target); });
addEventListener("popstate", () => location.reload());
showTab();
showLayout();
last = query();
price("start").then(() => { last = query(); });
search();
