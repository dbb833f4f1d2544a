"""Write a report as a comment of a pull request, or update the comment of an earlier call. Called by action.yml.

Variables: TOKEN, PULL_REQUEST (its number), REPORT (a file), NAME (of the comment), and GitHub's own GITHUB_API_URL and
GITHUB_REPOSITORY. Needs only the standard library. A token that may not write is told in one line, and is no error.
"""

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from typing import Any, Final

LONGEST: Final = 65_000
"""Characters; GitHub takes 65,536."""
MOST_PAGES: Final = 30
ACTIONS_LOGIN: Final = "github-actions[bot]"


def ask(method: str, path: str, content: object = None) -> Any:
    request = urllib.request.Request(
        f"{os.environ['GITHUB_API_URL']}/{path}",
        None if content is None else json.dumps(content).encode(),
        {
            "Authorization": f"Bearer {os.environ['TOKEN']}",
            "Accept": "application/vnd.github+json",
            "Content-Type": "application/json",
            "User-Agent": "stepscope",
        },
        method=method,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def login() -> str:
    """The name of the token's owner; the token of a workflow may not ask for it."""
    try:
        return str(ask("GET", "user")["login"])
    except urllib.error.HTTPError:
        return ACTIONS_LOGIN


def earlier(comments: str, marker: str) -> int | None:
    """The number of our comment; another's with the same marker is not ours."""
    own = login()
    for page in range(1, MOST_PAGES + 1):
        found = ask("GET", f"{comments}?per_page=100&page={page}")
        for comment in found:
            author, body = comment["user"] or {}, comment["body"] or ""  # null where an account is gone
            if author.get("login") == own and body.startswith(marker):
                return int(comment["id"])
        if len(found) < 100:
            break
    return None


def body_of(marker: str, report: str) -> str:
    if len(report) > LONGEST:
        report = report[:LONGEST].rpartition("\n")[0] + "\n\nThe rest is in the summary of the job."
        report += "\n\n</details>" * (report.count("<details>") - report.count("</details>"))
    return f"{marker}\n{report}"


def main() -> None:
    repository = f"repos/{os.environ['GITHUB_REPOSITORY']}"
    comments = f"{repository}/issues/{int(os.environ['PULL_REQUEST'])}/comments"
    marker = f"<!-- stepscope: {re.sub(r'[^A-Za-z0-9 ._]', '', os.environ['NAME'])} -->"
    with open(os.environ["REPORT"], encoding="utf-8") as file:
        content = {"body": body_of(marker, file.read())}
    try:
        known = earlier(comments, marker)
        if known is None:
            ask("POST", comments, content)
        else:
            ask("PATCH", f"{repository}/issues/comments/{known}", content)
    except (OSError, http.client.HTTPException, ValueError) as error:  # also an answer that breaks off
        print(f"::notice title=stepscope::No comment was written ({error}): the report is in the job's summary.")


if __name__ == "__main__":
    main()
