//! The allocator of everything that links this crate: the system's, with a bound on what a thread
//! may take where one was set.
//!
//! Interpreters of foreign code (chat templates, tokenizers) have no limit of their own on what
//! one operation builds, and an allocation can't be refused to them: they abort the process. So a
//! thread that asks for more than its bound stops inside its request, for ever, and whoever waits
//! for it learns that from [`Watch`]. It leaves behind what it holds, which the bound bounds.

#![allow(unsafe_code, reason = "an allocator is unsafe to implement")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// What a bounded thread and the one that waits for it tell each other.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    spent: AtomicBool,
    abandoned: AtomicBool,
}

impl Watch {
    /// Whether the thread has stopped because it took too much.
    pub(crate) fn spent(&self) -> bool {
        self.spent.load(Ordering::Acquire)
    }

    /// Stops the thread at its next allocation.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }
}

thread_local! {
    /// Bytes that this thread may still take.
    static LEFT: Cell<isize> = const { Cell::new(0) };
    /// The watch over this thread, null where there is no bound.
    static WATCH: Cell<*const Watch> = const { Cell::new(ptr::null()) };
}

/// Runs `work` so that no more than `bytes` beyond what it gives back are allocated by this
/// thread at any time. If it asks for more, this never returns, and `watch` tells it.
pub(crate) fn bounded<T>(bytes: usize, watch: &Arc<Watch>, work: impl FnOnce() -> T) -> T {
    struct Lift;
    impl Drop for Lift {
        fn drop(&mut self) {
            WATCH.set(ptr::null());
        }
    }
    let held = Arc::clone(watch);
    LEFT.set(isize::try_from(bytes).unwrap_or(isize::MAX));
    WATCH.set(Arc::as_ptr(&held));
    // Dropped before `held`, also when `work` panics.
    let _lift = Lift;
    work()
}

/// Set when the system had no memory: what follows, if it was not expected, is an abort.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether the system has ever refused memory to this process.
pub(crate) fn was_refused() -> bool {
    REFUSED.load(Ordering::Relaxed)
}

/// Books bytes that this thread takes.
fn take(bytes: usize) {
    let watch = WATCH.get();
    if watch.is_null() {
        return;
    }
    let left = LEFT.get().saturating_sub_unsigned(bytes);
    LEFT.set(left);
    // SAFETY: `bounded` keeps the watch alive for as long as the pointer is set.
    let watch = unsafe { &*watch };
    let stopped = left < 0 || watch.abandoned.load(Ordering::Acquire);
    // A panic may hold locks that others need, and takes little.
    if stopped && !thread::panicking() {
        watch.spent.store(true, Ordering::Release);
        loop {
            thread::sleep(Duration::from_secs(3600));
        }
    }
}

/// Books bytes that this thread gives back.
fn give(bytes: usize) {
    if !WATCH.get().is_null() {
        LEFT.set(LEFT.get().saturating_add_unsigned(bytes));
    }
}

/// Notes a refusal.
fn noted(pointer: *mut u8) -> *mut u8 {
    if pointer.is_null() {
        REFUSED.store(true, Ordering::Relaxed);
    }
    pointer
}

struct Bounded;

#[global_allocator]
static ALLOCATOR: Bounded = Bounded;

// SAFETY: every call goes to the system's allocator with the caller's arguments, whose contract is
// the same. Booking before it touches thread-local cells without destructors, and allocates nothing.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: as above.
        noted(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: as above.
        noted(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        give(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        take(size);
        give(layout.size());
        // SAFETY: as above.
        noted(unsafe { System.realloc(pointer, layout, size) })
    }
}
