//! Runs interpreters of foreign files where they can do no harm.

use std::io;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::allocation::{Watch, bounded};

/// How often the one who waits looks whether a bound was reached.
const LOOK: Duration = Duration::from_millis(20);

/// What a piece of work may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Bytes of stack. It is address space until it is touched.
    pub(super) stack: usize,
    /// Bytes of heap at any time.
    pub(super) memory: usize,
    /// Time by the clock.
    pub(super) time: Duration,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum Stopped {
    /// A bound was reached; says which.
    #[error("stopped after {0}")]
    Bound(String),
    /// The work panicked.
    #[error("its interpreter panicked")]
    Panicked,
    /// No thread could be started.
    #[error("no thread with {stack} bytes of stack: {source}")]
    NoThread { stack: usize, source: io::Error },
}

/// Does some work on a thread of its own, within bounds.
///
/// Foreign files nest cheaply what their interpreters recurse over, and build large values from
/// short sources. Stack and memory are as large as honest files need, and a panic becomes an
/// error. A thread that has reached a bound is left alone: it stops at its next allocation and
/// keeps what it holds, at most `bounds.memory`, until the process ends.
///
/// # Errors
/// [`Stopped`], with what was too much.
pub(super) fn confined<T: Send + 'static>(
    name: &str,
    bounds: Bounds,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Stopped> {
    let watch = Arc::new(Watch::default());
    let theirs = Arc::clone(&watch);
    let (sender, receiver) = mpsc::channel();
    let started = Instant::now();
    thread::Builder::new()
        .name(name.to_owned())
        .stack_size(bounds.stack)
        .spawn(move || {
            let done = bounded(bounds.memory, &theirs, work);
            // Nobody waits any more after a bound was reached.
            let _ = sender.send(done);
        })
        .map_err(|source| Stopped::NoThread { stack: bounds.stack, source })?;
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(done) => return Ok(done),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Stopped::Panicked);
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if watch.spent() {
            return Err(Stopped::Bound(format!("{} bytes of memory", bounds.memory)));
        }
        if started.elapsed() > bounds.time {
            watch.abandon();
            return Err(Stopped::Bound(format!("{} seconds", bounds.time.as_secs())));
        }
    }
}
