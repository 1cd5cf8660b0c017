//! `gemma4-run`: answers prompts, or talks.

mod answer;
mod arguments;
mod conversation;
mod input;
mod interactive;
mod output;
mod printer;
mod prompt;
mod repetition;
mod stats;

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use serde_json::Value;

use self::answer::{Answer, End, Event, Request};
pub use self::arguments::Arguments;
use self::arguments::Format;
use self::input::Job;
use self::printer::Printer;
use self::prompt::Prompter;
use self::stats::{Place, Stats};
use super::{INTERRUPTED, Interrupt, Progress, Usage};
use crate::text::modality_ids;
use crate::{ExitClass, LoadedProgram, OpenDevice, Session, SessionOptions};

/// Runs the command.
///
/// # Errors
/// Whatever keeps a prompt from being answered.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    check(&arguments)?;
    let jobs = input::read(&arguments)?;
    let started = Instant::now();
    let program = Arc::new(arguments.files.map()?);
    let prompter = Prompter::new(&arguments, &program)?;
    let text = &program.program().text;
    arguments.sampling(text, 0).check()?;
    arguments.rules().check(program.program().vocab_size)?;
    // What one prompt has wrong is said before the weights are read.
    let first = match &jobs[..] {
        [job] if arguments.prompts.is_none() => Some(prompter.encode(&job.prompt)?),
        _ => None,
    };
    let device = arguments.placement.open(Arc::clone(&program), arguments.quiet)?;
    let options =
        SessionOptions { max_context: arguments.placement.max_context, prefill_chunk: None };
    let mut session = Session::new(device.device(), options)?;
    session.suppress(modality_ids(prompter.tokenizer()));
    let place = Place::new(&device, session.context(), started.elapsed().as_secs_f64());
    let mut runner = Runner {
        arguments: &arguments,
        program: &program,
        prompter,
        device: &device,
        session,
        place,
        interrupt: Interrupt::install()?,
    };
    if let Some(path) = &arguments.load_session {
        restore(&mut runner.session, path)?;
    }
    let code = match arguments.interactive {
        true => interactive::talk(&mut runner)?,
        false => runner.answer_all(jobs, first)?,
    };
    if let Some(path) = &arguments.save_session {
        save(&mut runner.session, path)?;
    }
    Ok(code)
}

/// What clap can't say about flags.
fn check(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.logprobs.is_some() && arguments.output == Format::Text {
        return Err(Usage("--logprobs needs --output json or jsonl".to_owned()).into());
    }
    if arguments.output != Format::Text && arguments.thoughts.is_some() {
        let why = "--thoughts is for text; JSON has thoughts in a field of their own";
        return Err(Usage(why.to_owned()).into());
    }
    Ok(())
}

/// A loaded model, ready to answer.
struct Runner<'a> {
    arguments: &'a Arguments,
    program: &'a LoadedProgram,
    prompter: Prompter,
    device: &'a OpenDevice,
    session: Session,
    place: Place,
    interrupt: Interrupt,
}

impl Runner<'_> {
    /// Answers one prompt after another and writes the answers.
    fn answer_all(
        &mut self,
        jobs: Vec<Job>,
        mut first: Option<Vec<u32>>,
    ) -> anyhow::Result<ExitCode> {
        let many = self.arguments.prompts.is_some();
        let (mut documents, mut reports) = (Vec::new(), Vec::new());
        let (mut code, mut told) = (0, false);
        for job in jobs {
            if many {
                self.session.reset();
            }
            let id = job.id.clone();
            let done = self.answer(job, first.take());
            let (answer, stats) = match done {
                Ok(done) => done,
                Err(error) if many && !super::is_broken_pipe(&error) => {
                    // A wrong prompt is not a wrong call, but a device that failed has failed.
                    let lacking = super::exit_class(&error) == ExitClass::Resources;
                    let class = if lacking { ExitClass::Resources } else { ExitClass::Failure };
                    code = class.code().max(code);
                    let error = super::sentence(&error);
                    super::say(&format!("error: {error}\n"));
                    documents.extend(self.write(output::failed(id, &error))?);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let tokenizer = self.prompter.tokenizer();
            let document = output::answered(id, &answer, &stats, &self.place, tokenizer);
            documents.extend(self.write(document)?);
            if !self.arguments.quiet {
                let place = if told { String::new() } else { self.place.text() };
                super::say(&(place + &stats.text(&self.place, &answer)));
                told = true;
            }
            // Thousands of answers leave nothing behind that nobody asked for.
            if self.arguments.stats_json.is_some() {
                reports.push(stats.json(&self.place, &answer));
            }
            if answer.end == End::Interrupted {
                code = INTERRUPTED;
                break;
            }
        }
        if self.arguments.output == Format::Json {
            print_json(&unless_one(documents, many))?;
        }
        if let Some(path) = &self.arguments.stats_json {
            write_stats(path, &unless_one(reports, many))?;
        }
        Ok(ExitCode::from(code))
    }

    /// Writes a line where each answer is one; hands back what a document is made of.
    fn write(&self, answer: Value) -> anyhow::Result<Option<Value>> {
        match self.arguments.output {
            Format::Text => Ok(None),
            Format::Json => Ok(Some(answer)),
            Format::Jsonl => {
                print_line(&serde_json::to_string(&answer)?)?;
                Ok(None)
            }
        }
    }

    fn answer(&mut self, job: Job, ids: Option<Vec<u32>>) -> anyhow::Result<(Answer, Stats)> {
        let ids = match ids {
            Some(ids) => Some(ids),
            None => self.prompter.encode_or_interrupt(job.prompt, self.interrupt.flag())?,
        };
        let Some(ids) = ids else { return Ok((Answer::interrupted(), Stats::default())) };
        let mut request = self.request(ids);
        request.sampling.seed = job.seed.unwrap_or(request.sampling.seed);
        request.max_new_tokens = job.max_new_tokens.unwrap_or(request.max_new_tokens);
        let mut printer = match self.arguments.output {
            Format::Text => Some(Printer::new(self.arguments.thoughts)),
            Format::Json | Format::Jsonl => None,
        };
        let (answer, stats) = self.ask(&request, printer.as_mut())?;
        if let Some(printer) = printer.as_mut().filter(|_| answer.first_token_seconds.is_some()) {
            printer.end()?;
        }
        Ok((answer, stats))
    }

    /// What the flags say of a prompt.
    fn request(&self, ids: Vec<u32>) -> Request {
        Request {
            ids,
            sampling: self.arguments.sampling(&self.program.program().text, fresh_seed()),
            rules: self.arguments.rules(),
            max_new_tokens: self.arguments.max_new_tokens.unwrap_or(u32::MAX),
            stop_strings: self.arguments.stop.clone(),
            detect_loops: self.arguments.detect_loops,
        }
    }

    /// Answers a request, writing the text as it comes if there is a printer.
    fn ask(
        &mut self,
        request: &Request,
        mut printer: Option<&mut Printer>,
    ) -> anyhow::Result<(Answer, Stats)> {
        if self.arguments.verbose {
            super::say(&format!("{:?}\n", self.prompter.spell(&request.ids)));
        }
        let mut bar = Some(match self.arguments.quiet {
            true => Progress::hidden(),
            false => Progress::tokens("reading the prompt"),
        });
        let (mut calls, mut calls_before) = (None, None);
        let device = self.device;
        let tokenizer = self.prompter.tokenizer();
        let flag = self.interrupt.flag();
        let answer = answer::answer(&mut self.session, tokenizer, request, flag, |event| {
            match (event, printer.as_mut()) {
                (Event::Read(done, total), _) if done < total => {
                    if let Some(bar) = &bar {
                        bar.set(done as u64, total as u64);
                    }
                }
                (Event::Read(..), _) => bar = None,
                (Event::Drawn, _) => {
                    let now = device.calls();
                    let before = *calls_before.get_or_insert(now);
                    calls = now.zip(before).map(|(now, before)| now.since(before));
                }
                (Event::Part(part), Some(printer)) => printer.part(part)?,
                (Event::Part(_), None) => {}
            }
            Ok(())
        })?;
        let sampling = &request.sampling;
        let seed = (sampling.temperature > 0.0).then_some(sampling.seed);
        Ok((answer, Stats { calls, seed }))
    }
}

fn restore(session: &mut Session, path: &Path) -> anyhow::Result<()> {
    let file = File::open(path).with_context(|| format!("cannot read `{}`", path.display()))?;
    session.restore(&mut BufReader::new(file)).with_context(|| format!("`{}`", path.display()))
}

/// Writes the context; a file of that name is replaced when all is written.
fn save(session: &mut Session, path: &Path) -> anyhow::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let written = File::create(&partial)
        .map_err(anyhow::Error::from)
        .and_then(|file| Ok(session.save(&mut BufWriter::new(file))?))
        .and_then(|()| Ok(fs::rename(&partial, path)?));
    if written.is_err() {
        // What is left of it helps nobody.
        let _ = fs::remove_file(&partial);
    }
    written.with_context(|| format!("cannot write `{}`", path.display()))
}

/// A number that nobody can predict, from the standard library's own source of keys.
fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// A list, or its only element where there was one question.
fn unless_one(mut values: Vec<Value>, many: bool) -> Value {
    if many { Value::Array(values) } else { values.pop().unwrap_or_default() }
}

fn print_json(value: &Value) -> anyhow::Result<()> {
    print_line(&serde_json::to_string_pretty(value)?)
}

fn print_line(line: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

fn write_stats(path: &Path, stats: &Value) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(stats)?;
    fs::write(path, json + "\n").with_context(|| format!("cannot write `{}`", path.display()))
}
