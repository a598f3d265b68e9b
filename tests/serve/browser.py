"""Headless Chromium on the page."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.services import BROWSER, need

_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--window-size=1360,1000",
    "--hide-scrollbars",
)


class Page:
    """A browser with the page open."""

    def __init__(self) -> None:
        need("chromium", required_by=BROWSER)
        need("chromedriver", "chromium-driver", required_by=BROWSER)
        options = webdriver.ChromeOptions()
        for option in _OPTIONS:
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        options.binary_location = shutil.which("chromium") or ""
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)

    def open(self, url: str) -> None:
        """Loads the page anew, its storage empty, and waits until it knows the model or why not."""
        self.driver.get(url)
        if self.js("sessionStorage.length"):
            self.driver.execute_script("sessionStorage.clear()")
            self.driver.get(url)
        self.wait(lambda: self.text("model") != "…")

    def get(self, name: str) -> WebElement:
        """The element with an id."""
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        """Elements by CSS."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, name: str) -> str:
        """What an element says, shown or not."""
        return str(self.get(name).get_property("textContent")).strip()

    def js(self, script: str) -> Any:
        """The value of an expression."""
        return self.driver.execute_script(f"return {script}")

    def cdp(self, command: str, **arguments: Any) -> None:
        """A command of the DevTools protocol."""
        self.driver.execute_cdp_cmd(command, arguments)

    def wait(self, done: Callable[[], object], seconds: float = 20) -> None:
        """Waits until something is so."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "it does not come about"
            time.sleep(0.02)

    def set(self, name: str, value: str) -> None:
        """Fills in a field, opening the parameters."""
        self.driver.execute_script("document.getElementById('settings').open = true")
        field = self.get(name)
        field.clear()
        field.send_keys(value)

    def ask(self, question: str) -> None:
        """Types a question and presses Enter."""
        self.get("question").send_keys(question, Keys.ENTER)

    def finish(self) -> None:
        """Waits until no answer is on its way."""
        self.wait(lambda: not self.get("stop").is_enabled())

    def switch(self) -> None:
        """Flips the switch for speculation."""
        self.all(".switch")[0].click()

    def answers(self) -> list[str]:
        """The texts of the answers."""
        return [str(one.get_property("textContent")) for one in self.all(".answer .text")]

    def notice(self) -> str:
        """What the page has to say, when it has."""
        self.wait(lambda: self.get("notice").is_displayed())
        return self.text("notice")

    def complaints(self) -> list[str]:
        """What the console says since the last call; refused requests are expected there."""
        log = self.driver.get_log("browser")
        return [e["message"] for e in log if "Failed to load resource" not in e["message"]]

    def close(self) -> None:
        """Ends the browser."""
        self.driver.quit()
