//! How far a long job is, and whether the user wants it to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gemma4_runtime::cli;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{Error, Result};

/// Set when the user asks to stop; long jobs look at it between blocks of rows.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// One that Ctrl-C and requests to terminate set. For the main function: a process has one.
    ///
    /// # Errors
    /// If the handler can't be installed.
    pub fn on_ctrl_c() -> Result<Self, ctrlc::Error> {
        let interrupt = Self::default();
        let flag = interrupt.clone();
        ctrlc::set_handler(move || flag.set())?;
        Ok(interrupt)
    }

    /// Asks to stop.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// [`Error::Interrupted`] once it is set.
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }
}

/// Shows progress on standard error and passes on the wish to stop.
#[derive(Debug)]
pub struct Monitor {
    bar: ProgressBar,
    verbose: bool,
    silent: bool,
    interrupt: Interrupt,
}

impl Monitor {
    /// Draws a bar if standard error is a terminal; with `verbose`, prints a line per weight
    /// instead.
    pub fn new(verbose: bool, interrupt: Interrupt) -> Self {
        let target = match verbose {
            true => ProgressDrawTarget::hidden(),
            false => ProgressDrawTarget::stderr(),
        };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template(
            "{bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta} {wide_msg}",
        ) {
            bar.set_style(style);
        }
        Self { bar, verbose, silent: false, interrupt }
    }

    /// One that shows nothing and never stops.
    pub fn silent() -> Self {
        let bar = ProgressBar::hidden();
        Self { bar, verbose: false, silent: true, interrupt: Interrupt::default() }
    }

    /// Tells the user something that is no error.
    pub fn note(&self, text: &str) {
        if !self.silent {
            self.bar.suspend(|| cli::note(text));
        }
    }

    /// A job of so many bytes begins.
    pub fn begin(&self, bytes: u64) {
        self.bar.set_length(bytes);
        self.bar.reset();
    }

    /// The weight that comes next.
    pub fn weight(&self, name: &str, encoding: &str) {
        if self.verbose {
            cli::say(&format!("{name}: {encoding}\n"));
        }
        self.bar.set_message(name.to_owned());
    }

    /// So many bytes are done.
    ///
    /// # Errors
    /// [`Error::Interrupted`] when the user wants to stop.
    pub fn advance(&self, bytes: u64) -> Result<()> {
        self.bar.inc(bytes);
        self.interrupt.check()
    }

    /// So many kernels of so many are compiled.
    pub fn compiled(&self, done: usize, total: usize) {
        self.bar.set_message(format!("compiling kernels: {done} of {total}"));
    }

    /// The job is done.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
