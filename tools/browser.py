"""A headless Chromium that looks at the operators' page, for tests and pictures."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tools.running_cluster import Cluster
from tools.waiting import PATIENCE_S, wait_for

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which a test that runs as root cannot have
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-proxy-server",
    "--lang=en",
)


def missing() -> str:
    """The program that is not installed here, "" if both are."""
    return next((name for name in ("chromium", "chromedriver") if shutil.which(name) is None), "")


@dataclass(frozen=True, slots=True)
class Browser:
    """One tab. Conditions are JavaScript: `return …` is added."""

    driver: webdriver.Chrome

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the script; return its result."""
        return self.driver.execute_script(script, *arguments)

    def look(self, expression: str, *arguments: Any) -> Any:
        return self.run(f"return {expression}", *arguments)

    def wait(self, expression: str, *arguments: Any, what: str = "", timeout_s: float = PATIENCE_S) -> Any:
        """Wait until it is true; returns its value."""
        return wait_for(lambda: self.look(expression, *arguments), timeout_s, what or expression)

    def click(self, selector: str) -> None:
        """Click as a user would: the element must be visible, with nothing over it."""
        element = self.driver.find_element("css selector", selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def type(self, selector: str, words: str) -> None:
        element = self.driver.find_element("css selector", selector)
        element.clear()
        element.send_keys(words)

    def errors(self) -> list[str]:
        """Return the console's complaints since the last look."""
        rows: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [row["message"] for row in rows if row["level"] in ("SEVERE", "WARNING")]

    def set_size(self, width: int, height: int) -> None:
        """Set the page's size in CSS pixels; may be narrower than any window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def set_dark(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def enter(self, cluster: Cluster, key: str = "") -> None:
        """Open a cluster's page and give it a key, by default the admin's; does not wait for its content."""
        self.visit(cluster.context["admin"], key or Path(cluster.context["admin_key_file"]).read_text().strip())

    def visit(self, admin: str, key: str) -> None:
        """Open the page of the admin port at that address."""
        self.driver.get(f"{admin}/ui")
        self.wait("document.activeElement.id === 'key'", what="the page asks for the key")
        self.type("#key", key)
        self.click("#login button")


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """A new browser with an empty profile, ended afterwards."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
