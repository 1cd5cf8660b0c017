//! What faults of the machine end in: a sentence and an exit code instead of a core dump.

#![allow(unsafe_code, reason = "handlers of signals are installed through the C library")]

use std::mem::MaybeUninit;
use std::ptr;

use libc::{c_int, c_void, siginfo_t};

use crate::ExitClass;
use crate::allocation::was_refused;

const SHORTENED: &str = "error: a mapped file, which is the weights, became shorter or could not be \
read from its disk while it was in use; put it back and start again\n";

const NO_MEMORY: &str =
    "error: there is not enough memory; choose a shorter context, or free some\n";

/// Installs the handlers: of the reading of a mapped file that is no longer there (SIGBUS), and
/// of the abort after memory was refused to code that can't do without (SIGABRT).
pub(super) fn install() {
    for (signal, handler) in [(libc::SIGBUS, bus as Handler), (libc::SIGABRT, abort as Handler)] {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all zeros are a valid `sigaction` with an empty mask. Both handlers have the
        // signature that SA_SIGINFO asks for and do nothing but what a signal handler may: read
        // an atomic and the kernel's description of the fault, write(2) and _exit(2). With
        // SA_RESETHAND, one that returns leaves the signal to its default action.
        unsafe {
            let action = action.assume_init_mut();
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESETHAND | libc::SA_ONSTACK;
            libc::sigaction(signal, action, ptr::null_mut());
        }
    }
}

type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

extern "C" fn bus(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel hands a valid description to a handler with SA_SIGINFO.
    if unsafe { (*info).si_code } == libc::BUS_ADRERR {
        end(SHORTENED, ExitClass::Failure);
    }
}

extern "C" fn abort(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    if was_refused() {
        end(NO_MEMORY, ExitClass::Resources);
    }
}

fn end(sentence: &str, class: ExitClass) -> ! {
    // SAFETY: the bytes are a static string's, and both calls are allowed in a signal handler.
    unsafe {
        libc::write(libc::STDERR_FILENO, sentence.as_ptr().cast(), sentence.len());
        libc::_exit(c_int::from(class.code()))
    }
}
