// The server's API with the key of this tab. The key comes with the address, behind the # (which is never sent), or from the form.

const KEY = "upweight-key";

export class NoKey extends Error {}

export function takeKeyFromAddress() {
  const given = /^#key=([^/]+)(.*)$/.exec(location.hash);
  if (!given) return;
  sessionStorage.setItem(KEY, decodeURIComponent(given[1]));
  history.replaceState(null, "", location.pathname + "#" + (given[2] || "/"));
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** GET a path below the server's root. Throws NoKey when a key is missing or unknown, Error with the server's words else. */
export async function get(path, query = {}) {
  const key = sessionStorage.getItem(KEY);
  if (!key) throw new NoKey("");
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value != null));
  const answer = await fetch(asked.size ? `${path}?${asked}` : path, { headers: { Authorization: `Bearer ${key}` } });
  if (answer.status === 401) throw new NoKey("This server does not know the key.");
  const body = await answer.json().catch(() => null);
  if (!answer.ok) throw new Error(wordsOf(body) || `the server answered ${answer.status}`);
  return body;
}

export const job = (id) => `v1/fine_tuning/jobs/${encodeURIComponent(id)}`;
export const rl = (id, what) => `v1alpha1/fine_tuning/jobs/${encodeURIComponent(id)}/${what}`;

function wordsOf(body) {
  if (!body) return "";
  if (typeof body.detail === "string") return body.detail;
  if (Array.isArray(body.detail)) return body.detail.map((one) => one.msg).join("; ");
  return body.error?.message ?? "";
}
