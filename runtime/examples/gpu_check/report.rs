//! A line for each check.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

/// What was checked so far.
#[derive(Default)]
pub(crate) struct Report {
    subject: String,
    passed: u32,
    failed: u32,
}

impl Report {
    /// Names what the next checks are about.
    pub(crate) fn set_subject(&mut self, subject: String) {
        self.subject = subject;
    }

    /// Runs a check, which returns what it found.
    pub(crate) fn check(&mut self, name: &str, body: impl FnOnce() -> anyhow::Result<String>) {
        self.value(name, || body().map(|found| ((), found)));
    }

    /// Runs a check that makes something which others need.
    pub(crate) fn value<T>(
        &mut self,
        name: &str,
        body: impl FnOnce() -> anyhow::Result<(T, String)>,
    ) -> Option<T> {
        let started = Instant::now();
        let result = body();
        let seconds = started.elapsed().as_secs_f64();
        let (word, value, found) = match result {
            Ok((value, found)) => ("ok  ", Some(value), found),
            Err(error) => ("FAIL", None, format!("{error:#}")),
        };
        *(if value.is_some() { &mut self.passed } else { &mut self.failed }) += 1;
        say(&format!("{word} {:<22} {name:<28} {seconds:6.2} s  {found}\n", self.subject));
        value
    }

    /// Prints the sum and says how the program ends.
    pub(crate) fn finish(&self) -> ExitCode {
        say(&format!("{} passed, {} failed\n", self.passed, self.failed));
        ExitCode::from(u8::from(self.failed > 0))
    }
}

fn say(line: &str) {
    // Nobody is left to be told that stdout is closed.
    let _ = io::stdout().write_all(line.as_bytes()).and_then(|()| io::stdout().flush());
}
