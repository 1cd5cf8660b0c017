use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::INTERRUPTED;

/// What Ctrl-C does, SIGTERM and SIGHUP too: it sets a flag that whatever runs looks at, and ends
/// the process with code 130 when it comes once too often.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<State>);

#[derive(Debug)]
struct State {
    flag: Arc<AtomicBool>,
    /// How many more signals only set the flag.
    patience: AtomicU32,
}

impl Interrupt {
    /// Installs the handler; once in a process. The first signal sets the flag, the second ends
    /// the process.
    ///
    /// # Errors
    /// If the system refuses, or there is a handler already.
    pub fn install() -> anyhow::Result<Self> {
        let state = Arc::new(State { flag: Arc::default(), patience: AtomicU32::new(1) });
        let interrupt = Self(Arc::clone(&state));
        ctrlc::set_handler(move || {
            state.flag.store(true, Ordering::SeqCst);
            let less = |patience: u32| patience.checked_sub(1);
            if state.patience.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_err() {
                process::exit(i32::from(INTERRUPTED));
            }
        })?;
        Ok(interrupt)
    }

    /// Takes the flag back. From now on so many signals only set it, and the next one ends the
    /// process.
    pub fn allow(&self, signals: u32) {
        self.0.patience.store(signals, Ordering::SeqCst);
        self.0.flag.store(false, Ordering::SeqCst);
    }

    /// The flag.
    pub fn flag(&self) -> &Arc<AtomicBool> {
        &self.0.flag
    }

    /// Whether the flag is set.
    pub fn is_set(&self) -> bool {
        self.0.flag.load(Ordering::Relaxed)
    }
}
