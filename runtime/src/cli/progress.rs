use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar on stderr while something long runs; silent where stderr is no terminal.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar over bytes, named by what is being done.
    pub fn bytes(what: &'static str) -> Self {
        Self::new(what, "{msg} {bytes}/{total_bytes} {wide_bar} {bytes_per_sec} {eta}")
    }

    /// A bar over tokens.
    pub fn tokens(what: &'static str) -> Self {
        Self::new(what, "{msg} {pos}/{len} tokens {wide_bar} {eta}")
    }

    /// No bar, for whoever asks for quiet.
    pub fn hidden() -> Self {
        Self(ProgressBar::hidden())
    }

    fn new(what: &'static str, template: &str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::hidden();
        }
        let bar = ProgressBar::no_length().with_message(what);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    /// Shows how far it is.
    pub fn set(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
