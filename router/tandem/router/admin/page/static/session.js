// The admin key: in this tab's memory, sent in a header and never in an address. No cookie, so no other site can use it.

const NAME = "tandem-admin-key";
let key = sessionStorage.getItem(NAME) ?? "";

export const hasKey = () => key !== "";

export function useKey(text) {
  key = text;
  sessionStorage.setItem(NAME, text);
}

export function forgetKey() {
  key = "";
  sessionStorage.removeItem(NAME);
}

export class AskError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const isRefused = (error) => error.status === 401 || error.status === 403;

// A response of the admin port; AskError with its words unless it is good.
export async function open(path, { body, headers = {}, signal } = {}) {
  const response = await fetch(`../admin/v1/${path}`, {
    method: body === undefined ? "GET" : "POST",
    headers: {
      authorization: `Bearer ${key}`,
      ...(body === undefined ? {} : { "content-type": "application/json" }),
      ...headers,
    },
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
    signal,
  });
  if (!response.ok) throw new AskError(await words(response), response.status);
  return response;
}

export const ask = async (path, body) => (await open(path, { body })).json();

async function words(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}
